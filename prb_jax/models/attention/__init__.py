"""Attention over streams: XLA programs, and kernels for TPUs and GPUs."""
