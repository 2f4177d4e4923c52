"""The gates of a built benchmark: each finds one fault, and says how much of it there was and how much is left."""
