"""The wave_group strategy."""
