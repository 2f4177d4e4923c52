"""The public and the private part: no person, no question and no answer is in both."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prb_jax.building.gates.gate import Pair
from prb_jax.building.gates.words import NearTexts
from prb_jax.errors import short_repr
from prb_jax.metrics.clusters import Components
from prb_jax.scoring.comparison_table import clusters_of

_NEAR: Final = 0.6
"""Similarity of questions and answers that stay in one part: lower than that of duplicates, to be on the safe side."""


@dataclass(frozen=True)
class BenchmarkPart:
    """One part of the benchmark.

    Attributes:
      name: "public" or "private".
      pairs: of it.
      canary: a line with a number of its own, which is in every record: who finds it in a corpus or a model's output
        knows that the part leaked.
    """

    name: str
    pairs: tuple[Pair, ...]
    canary: str

    __repr__ = short_repr


def split_parts(
    pairs: Sequence[Pair], *, name: str, private_share: float, seed: int
) -> tuple[BenchmarkPart, BenchmarkPart]:
    """Return the public and the private part.

    Pairs that share a person, or a question or an answer but for a few words, stay together. What belongs together is
    shuffled by the seed, and goes to the private part until its share is reached.

    Args:
      pairs: in their order, which each part keeps.
      name: of the benchmark, for the canaries.
      private_share: of the pairs; it is not exceeded.
      seed: of the shuffle.
    """
    groups: dict[str, list[str]] = {}
    for pair, group in zip(pairs, _groups(pairs), strict=True):
        groups.setdefault(group, []).append(pair.id)
    order = sorted(groups.values(), key=lambda ids: hashlib.sha256(f"{seed}\0{min(ids)}".encode()).digest())
    held: set[str] = set()
    for ids in order:
        if len(held) + len(ids) <= private_share * len(pairs):
            held |= set(ids)
    public = tuple(pair for pair in pairs if pair.id not in held)
    private = tuple(pair for pair in pairs if pair.id in held)
    return (
        BenchmarkPart("public", public, _canary(name, "public", public)),
        BenchmarkPart("private", private, _canary(name, "private", private)),
    )


def _groups(pairs: Sequence[Pair]) -> list[str]:
    """A name for what belongs together, for each pair."""
    together = Components()
    users = clusters_of([pair.comparison for pair in pairs]).users
    questions, answers = NearTexts(_NEAR), NearTexts(_NEAR)
    for pair, user in zip(pairs, users, strict=True):
        this = f"pair {pair.id}"
        if user is not None:
            together.join(this, f"user {user}")
        texts = ((questions, pair.comparison.question), (answers, pair.chosen), (answers, pair.rejected))
        for index, text in texts:
            for other in index.owners(text):
                together.join(this, f"pair {other}")
            index.add(pair.id, text)
    return [str(together.root(f"pair {pair.id}")) for pair in pairs]


def _canary(name: str, part: str, pairs: Sequence[Pair]) -> str:
    """The canary of a part: its number follows from the texts, so that equal builds have equal bytes."""
    digest = hashlib.sha256(
        "\0".join(t for pair in pairs for t in (pair.id, *pair.comparison.responses)).encode()
    )
    number = uuid.uuid5(uuid.NAMESPACE_URL, f"{name}\0{part}\0{digest.hexdigest()}")
    return f"BENCHMARK DATA ({part} part of {name}) SHOULD NEVER APPEAR IN TRAINING CORPORA. canary GUID {number}"
