"""The bulk strategy."""
