"""Other libraries' scoring, ranking and training, for comparison. Only this package imports torch."""
