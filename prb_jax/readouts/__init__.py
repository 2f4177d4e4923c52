"""How open reward models turn hidden states into one reward: primitives, and a row for each model family."""

LAYOUTS = ("standard", "value-head")
"""Of checkpoints that are written: see :mod:`prb_jax.readouts.open_model`."""
