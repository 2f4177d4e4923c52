"""Comparisons of random words, and tiny checkpoints with a tokenizer to score them with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import prb_jax as prb
from tests import tiny_tokenizer as tiny
from tests.json_lines import read_lines, write_lines
from tests.tiny_models import write_tiny_model

TOLERANCE = 1e-5
WORDS = ("tea", "walk", "rain", "music", "bread", "hill", "train", "letter", "garden", "soup", "chess")


def text(rng: np.random.Generator, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS, int(rng.integers(least, most))))


def record(number: int, responses: int = 2, *, longest: int = 25) -> prb.Comparison:
    rng = np.random.default_rng(number)
    return prb.Comparison(
        id=f"c{number}",
        question=text(rng, 3, 12) + "?",
        responses=[f"{k}: {text(rng, 1, longest)}." for k in range(responses)],
        profile=[
            {"id": str(i), "category": "food" if i % 2 else "", "text": text(rng, 5, 20)}
            for i in range(number % 4)
        ],
        labels=None,
        narrative="SECRET",
    )


def ragged(rows: int, length: int, *, vocabulary: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sequences padded on the right with anything, one of one token and one without padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, vocabulary, (rows, length)).astype(np.int32)
    lengths = rng.integers(1, length + 1, rows).astype(np.int32)
    lengths[:2] = length, 1
    return tokens, lengths


def write_model(
    folder: Path, family: str, *, template: str = tiny.CHAT, bos: bool = False, **options: Any
) -> Path:
    """A random checkpoint of transformers with the tiny tokenizer."""
    pad = options.pop("pad", tiny.PAD)
    write_tiny_model(folder, family, **({"vocab_size": 400} | options))
    return tiny.write_tokenizer(folder, template=template, bos=bos, pad=pad)


def assert_close(scores: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for row, other in zip(scores, expected, strict=True):
        np.testing.assert_allclose(row, other, atol=TOLERANCE, rtol=0)


def write_comparisons(path: Path, comparisons: Iterable[prb.Comparison]) -> Path:
    write_lines(path, (comparison.to_row() for comparison in comparisons))
    return path


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def score_rows(out: Path) -> list[dict[str, Any]]:
    """The rows of scores in a run folder."""
    return read_lines(out / "scores.jsonl")
