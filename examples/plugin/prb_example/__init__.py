"""A benchmark, a reward, a gate, a read-out and a method of personalisation for prb_jax, each in a few lines."""
