"""Bundled strategies: one folder each, found through the registry."""
