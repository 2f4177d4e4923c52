"""Attention over streams: a reference, programs of XLA, and kernels of TPUs and GPUs."""
