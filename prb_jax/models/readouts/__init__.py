"""How open reward models turn hidden states into one reward: primitives, and a row for each model family."""
