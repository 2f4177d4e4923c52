"""Compiled programs are kept between tests, processes and runs, in the cache that `prb` uses."""

import os

from prb_jax.commands.compilation_cache import enable_compilation_cache

# The tests make their own fake devices; where libtpu is installed to compile for TPUs, jax would look for a TPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
enable_compilation_cache()
