"""Triton kernels of overlap, one file a kernel; `launch` holds what a host calls, `orders` what it hands them."""
