"""Triton kernels of overlap, one file a kernel; `launch` holds what a host calls, the orders are what it hands them."""
