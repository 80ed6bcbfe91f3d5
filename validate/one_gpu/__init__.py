"""What one GPU can tell without a second: kernels checked and timed alone, beside copies, and on fewer SMs."""
