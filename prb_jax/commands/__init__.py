"""The verbs of the command line: `add` says the arguments of one, `run` calls the library.

To add one, write such a file and name it in `prb_jax/cli.py`.
"""
