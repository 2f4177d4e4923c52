"""`prb bench`: how fast a model scores, trains, loads or ranks on this machine, beside the usual way."""

from prb_jax.bench.command import main

__all__ = ["main"]
