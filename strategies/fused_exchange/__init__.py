"""GEMM and all-to-all in one kernel, both ways round."""
