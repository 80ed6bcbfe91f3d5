"""The fused_tiles strategy."""
