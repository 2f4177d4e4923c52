"""Gates of a built benchmark: each finds one fault, and reports how much of it there was and how much is left."""
