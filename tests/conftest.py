"""Compiled programs are kept between tests, processes and runs, in the cache that `prb` uses."""

from prb_jax.commands.compilation_cache import enable_compilation_cache

enable_compilation_cache()
