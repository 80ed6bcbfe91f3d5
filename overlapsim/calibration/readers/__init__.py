"""Readers of what benchmark tools and profilers write; each gives records and findings."""
