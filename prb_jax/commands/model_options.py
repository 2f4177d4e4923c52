"""Options of the command line that say how a model is run, for every command that has them."""

from __future__ import annotations

import argparse


def add_quantize(parser: argparse.ArgumentParser, *, about: str) -> None:
    """``--quantize``; its choices are :data:`prb_jax.models.quantization.FORMS`, which takes JAX to import."""
    parser.add_argument("--quantize", choices=("int8", "int8-weights", "fp8"), help=about)


def add_attention(parser: argparse.ArgumentParser) -> None:
    """``--attention``; its choices are :data:`prb_jax.models.attention.choice.ATTENTIONS`."""
    parser.add_argument(
        "--attention",
        choices=("auto", "blockwise", "kernel"),
        default="auto",
        help="the machine's own choice (default), the block-wise XLA program, or the machine's kernel",
    )
