"""The embedded benchmark: 50 generated personas whose tastes decide between equally good answers.

Eight axes of taste (ordered steps or a story, studies or lived experience, caution or boldness, exact
numbers or feel, thrift or premium quality, tradition or novelty, humour or seriousness, warmth or
formality) have two poles each. A person cares about four of them. Two answers to one question are
written alike but for one or two axes, in which they show opposite poles, and are shown to people who
disagree. So nobody can tell the choice from the texts alone, while it follows from the person's tastes,
and these from the posts in the profile. 2 % of the choices are slips against the person's own taste.

Parts: "train" (40 seen personas, training topics), "test-seen" (the same people, other topics),
"test-unseen" (10 other people, test topics), "test" (both), "generic-train" and "generic-test" (one
answer is plainly worse for everyone), "all" (all of these), and, in none of these, "test-unseen-wording": 10 more
people, whose posts and answers use sentences that occur in no other part, and "train-more-wording": the people and
topics of "train" in further sentences, of a larger vocabulary. Subsets: "personal-seen", "personal-unseen",
"personal-unseen-wording", "generic".
The private fields ``rubric_aspects`` and ``narrative`` tell the reasons for a choice, and
``Personas.ceilings`` which accuracy is possible at best. ``satisfaction`` says how much any text pleases a person.
"""

from __future__ import annotations

from pathlib import Path

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, quote
from prb_jax.sources.personas.ceilings import Ceilings
from prb_jax.sources.personas.export import export
from prb_jax.sources.personas.generate import PARTS, Personas, generate
from prb_jax.sources.personas.satisfaction import satisfaction, shown_levels

__all__ = ["PARTS", "Ceilings", "Personas", "generate", "load", "satisfaction", "shown_levels", "write"]


def load(part: str = "test") -> list[Comparison]:
    """The records of one part of the benchmark, the same ones every time.

    Raises:
      DataError: for an unknown part.
    """
    if part not in PARTS:
        raise DataError(f"personas: no part {quote(part)}; expected one of {', '.join(PARTS)}")
    return list(generate().parts[part])


def write(folder: str | Path, *, seed: int = 0) -> dict[str, Path]:
    """Write every part (not the unions) to ``FOLDER/PART.jsonl.gz`` and return the paths by part."""
    return export(generate(seed), folder)
