"""Generation: texts sampled from a causal language model, and all that is done with such texts."""
