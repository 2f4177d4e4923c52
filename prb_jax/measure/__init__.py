"""Plans for TPU slices, and benchmarks of this machine."""
