"""Forward of one micro-batch with the backward of another."""
