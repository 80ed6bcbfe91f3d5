"""The pipelined_rs strategy."""
