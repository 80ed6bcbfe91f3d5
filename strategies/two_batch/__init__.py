"""Two-batch overlap."""
