"""Sharded parameters, gathered ahead of their use."""
