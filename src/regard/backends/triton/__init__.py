"""Reductions of an attention matrix in one pass on NVIDIA GPUs, as Triton kernels."""
