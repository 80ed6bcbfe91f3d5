"""One file a strategy: how its plan is run with torch, the library's collectives and the Triton kernels."""
