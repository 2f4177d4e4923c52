"""Attention over trees: a reference, a block-wise program, and kernels of TPUs and GPUs."""
