"""Pipeline transfers beside compute."""
