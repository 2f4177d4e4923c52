"""`python -m prb_jax` is the command `prb`."""

import sys

from prb_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
