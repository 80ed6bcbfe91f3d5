"""What a person sees: traces, plots, tables."""
