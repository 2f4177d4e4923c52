"""The usual ways of scoring, ranking and training, to measure against. The only room that imports torch."""
