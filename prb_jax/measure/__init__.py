"""Figures before and after a run: plans for TPU slices, and benches of this machine."""
