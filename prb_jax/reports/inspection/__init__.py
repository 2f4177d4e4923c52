"""`prb inspect`: describe a checkpoint, using only its headers."""
