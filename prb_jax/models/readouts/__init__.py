"""Read-outs of open reward models, from hidden states to one reward: primitives, and a row for each model family."""
