"""Machine descriptions: data only."""
