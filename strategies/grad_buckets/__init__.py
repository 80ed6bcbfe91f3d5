"""Data-parallel gradients in buckets."""
