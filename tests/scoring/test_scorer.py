"""The base class of all that scores: a subclass needs two methods, and evaluation asks nobody of what class it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.scoring.open_scorer import open_scorer
from prb_jax.scoring.own_scorer import OwnScorer
from prb_jax.scoring.scorer import Scorer
from prb_jax.text.view import View
from prb_jax.trees.tree import ScoredBatch, Skip, Truncation, skip_nothing
from tests.scoring.records import read_json
from tests.scoring.slow_scorer import SlowScorer, comparisons


@dataclass
class ByLength(Scorer):
    """Two methods, and what it was asked with."""

    asked: list[tuple[View | None, int | None]] = field(default_factory=list)

    def identity(self) -> dict[str, Any]:
        return {"name": "by length"}

    def stream(
        self,
        comparisons: Sequence[prb.Comparison],
        *,
        view: View | None = None,
        batch_tokens: int | None = None,
        skip: Skip = skip_nothing,
    ) -> Iterator[ScoredBatch]:
        self.asked.append((view, batch_tokens))
        for place, one in enumerate(comparisons):
            if not skip([place]):
                scores = np.asarray([len(text) for text in one.responses], np.float32)
                yield ScoredBatch([place], [scores], [0], [Truncation()])


class Decided(ByLength):
    uses = ("profile_posts",)

    @property
    def decided(self) -> str:
        return "decided elsewhere"


def test_a_subclass_with_two_methods_is_evaluated_with_its_controls(tmp_path: Path) -> None:
    scorer = ByLength()
    options: dict[str, Any] = {"controls": "all", "profile_posts": 2, "batch_tokens": 64, "progress": False}
    result = prb.evaluate(scorer, comparisons(12), out=tmp_path, **options)
    assert scorer.asked == [(View(2), 64)] * 3  # the run, blind and swap: one view, whole
    length = prb.evaluate("baseline:length", comparisons(12), progress=False).summary
    assert result.summary["accuracy"] == length["accuracy"]
    assert set(result.summary["controls"]) == {"blind", "swap"}
    inputs = read_json(tmp_path / "run.json")["inputs"]
    assert (inputs["profile_posts"], inputs["protocol"], inputs["max_length"]) == (2, "default", None)
    assert "jax" in inputs["versions"]


def test_options_that_a_scorer_does_not_use_are_refused_with_its_reason() -> None:
    prb.evaluate(Decided(), comparisons(4), profile_posts=3, progress=False)
    with pytest.raises(prb.RunError, match=r"^max_length, batch_tokens: decided elsewhere; remove them$"):
        prb.evaluate(Decided(), comparisons(4), max_length=9, batch_tokens=9, progress=False)


def test_an_object_of_a_user_gets_the_keywords_that_it_was_promised() -> None:
    own = SlowScorer()
    scorer = open_scorer(own, LoadOptions())
    assert isinstance(scorer, OwnScorer)
    assert open_scorer(scorer, LoadOptions()) is scorer
    list(scorer.stream(comparisons(3), view=View(1, max_length=7)))
    assert own.options == {"profile_posts": 1, "protocol": "default", "max_length": 7}
    list(scorer.stream(comparisons(3), batch_tokens=5))  # with the scorer's own view
    assert own.options == {"profile_posts": None, "protocol": None, "max_length": None, "batch_tokens": 5}
