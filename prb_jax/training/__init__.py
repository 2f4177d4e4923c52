"""Training: losses on trees, the optimiser, one step, and the loop around them."""
