"""Hugging Face checkpoints in and out: the only package that knows their tensor names."""
