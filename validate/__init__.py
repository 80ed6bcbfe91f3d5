"""Real kernels: torch, Triton and torch.distributed live only here."""
