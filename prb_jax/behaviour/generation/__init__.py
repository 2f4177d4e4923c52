"""Generation: sample texts from a causal language model, and use the samples."""
