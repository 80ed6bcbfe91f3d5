"""The serial strategy."""
