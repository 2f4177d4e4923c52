"""The embedded benchmark: 50 generated personas whose tastes decide between equally good answers.

Eight axes of taste (ordered steps or a story, studies or lived experience, caution or boldness, exact
numbers or feel, thrift or premium quality, tradition or novelty, humour or seriousness, warmth or
formality) have two poles each. A person cares about four of them. Two answers to one question are
written alike but for one or two axes, in which they show opposite poles, and are shown to people who
disagree. So nobody can infer the choice from only the texts, while it follows from the person's tastes,
and these from the posts in the profile. 2 % of the choices are slips against the person's own taste.

Parts: "train" (40 seen personas, training topics), "test-seen" (the same people, other topics),
"test-unseen" (10 other people, test topics), "test" (both), "generic-train" and "generic-test" (one
answer is plainly worse for everyone), "all" (all of these), and, in none of these, "test-unseen-wording": 10 more
people, whose posts and answers use sentences that occur in no other part, and "train-more-wording": the people and
topics of "train" in further sentences, of a larger vocabulary. Subsets: "personal-seen", "personal-unseen",
"personal-unseen-wording", "generic".
The private fields ``rubric_aspects`` and ``narrative`` tell the reasons for a choice, and
``Personas.ceilings`` which accuracy is possible at best. ``satisfaction`` measures how much any text pleases a person.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prb_jax.errors import DataError, quote
from prb_jax.records.comparison import Comparison
from prb_jax.records.files import Row
from prb_jax.records.sources.personas.design import Ceilings
from prb_jax.records.sources.personas.generate import PARTS, SINGLE_PARTS, Personas, generate
from prb_jax.records.sources.personas.satisfaction import satisfaction, shown_levels
from prb_jax.records.sources.source import Digest, Source
from prb_jax.records.writing import write_once

__all__ = ["PARTS", "Ceilings", "Personas", "generate", "load", "satisfaction", "shown_levels", "write"]


class PersonasSource(Source):
    """One part of the benchmark."""

    kind = "generated"

    def rows(self, *, subset: str | None, split: str) -> Iterator[Row]:
        for number, comparison in enumerate(load(self.name), start=1):
            yield Row(f"personas:{self.name}: row {number}", comparison)

    def describe(self, *, split: str, digest: Digest) -> dict[str, Any]:
        return {"kind": self.kind, "name": "personas", "part": self.name}


def load(part: str = "test") -> list[Comparison]:
    """Return the records of one part of the benchmark, the same on every call.

    Raises:
      DataError: The part is unknown.
    """
    if part not in PARTS:
        raise DataError(f"personas: no part {quote(part)}; expected one of {', '.join(PARTS)}")
    return list(generate().parts[part])


def write(folder: str | Path, *, seed: int = 0) -> dict[str, Path]:
    """Write every part (not the unions) to ``FOLDER/PART.jsonl.gz`` and return the paths by part.

    No time stamp or file name enters the compressed bytes.

    Raises:
      RunError: if a file cannot be written.
    """
    parts = generate(seed).parts
    paths = {part: Path(folder) / f"{part}.jsonl.gz" for part in SINGLE_PARTS}
    packed = {part: gzip.compress(serialise(parts[part]), compresslevel=6, mtime=0) for part in paths}
    write_once({path: packed[part] for part, path in paths.items()}, replace=True)
    return paths


def serialise(comparisons: Sequence[Comparison]) -> bytes:
    """Return the records as UTF-8 JSON lines; equal records give equal bytes."""
    lines = (json.dumps(c.to_row(), ensure_ascii=False) for c in comparisons)
    return "".join(line + "\n" for line in lines).encode("utf-8")
