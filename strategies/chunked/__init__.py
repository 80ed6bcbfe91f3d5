"""The chunked strategy."""
