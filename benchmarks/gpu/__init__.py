"""What the Triton kernels take on an NVIDIA GPU; ``python -m benchmarks.gpu`` measures it."""
