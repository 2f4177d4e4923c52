"""`prb bench`: how fast a model scores on this machine, beside the usual way of scoring."""

from prb_jax.bench.command import main

__all__ = ["main"]
