"""The verbs of the command line, one file each: `add` says its arguments, `run` calls the library.

To add one, write such a file and name it in `prb_jax/cli.py`.
"""
