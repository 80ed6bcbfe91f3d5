"""A whole training step: blocks from layer programs, a pipeline of blocks, and where the time goes."""
