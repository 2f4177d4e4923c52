"""A judge by name, wherever a reward is named: it rates texts without labels, and what it does not say is no number.

`judge:MODEL` rates from 1 to 9 how well a response serves its user, `rubric:MODEL` how well it does each aspect of the
true rubric (0, 1 or 2; the mean). MODEL is a causal language model on this machine, or `URL#NAME`, the model NAME of an
endpoint. See `prb_jax.generation.judge_ratings` for how they are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import PrbError, RunError, quote
from prb_jax.generation.endpoint import KEY, Endpoint, EndpointOptions
from prb_jax.generation.judge import TOGETHER, Judgement, Way
from prb_jax.generation.judge_ratings import ExpectedRatings
from prb_jax.generation.judge_ways import RUBRIC, SCORE, JudgeOptions, local_way, spoken_way
from prb_jax.generation.speakers import EndpointSpeaker
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.text.protocol import TextProtocol
from prb_jax.trees.batches import ScoredBatch
from prb_jax.trees.tree import Truncation

PREFIXES: Final = {"judge:": SCORE, "rubric:": RUBRIC}
"""Before the name of a judge: how it is asked."""


@dataclass(frozen=True)
class JudgeName:
    """A judge as it is named.

    Attributes:
      protocol: "score" or "rubric".
      model: folder or hub id; at an endpoint the model's name there.
      url: of the endpoint; None for a model on this machine.
    """

    protocol: str
    model: str
    url: str | None = None


def is_judge(name: object) -> bool:
    """Tell whether a reward is named as a judge."""
    return isinstance(name, str) and name.startswith(tuple(PREFIXES))


def parse_judge(name: str) -> JudgeName:
    """Return the parts of a name.

    Raises:
      RunError: it names no model.
    """
    prefix = next(each for each in PREFIXES if name.startswith(each))
    protocol, model = PREFIXES[prefix], name.removeprefix(prefix)
    if not model.startswith(("http://", "https://")):
        if not model:
            raise RunError(f"{quote(name)}: expected {prefix}MODEL, a folder or hub id, or {prefix}URL#NAME")
        return JudgeName(protocol, model)
    url, _, named = model.partition("#")
    if not named:
        raise RunError(
            f"{quote(name)}: expected {prefix}URL#NAME, where NAME is the model's name at the endpoint"
        )
    return JudgeName(protocol, named, url)


class RatingScorer:
    """A :class:`prb_jax.scoring.scorer.Scorer` that asks a judge for ratings. Build with :func:`open_judge`.

    Attributes:
      way: how it is asked: gives "ratings" among the facts of its judgements, None for one that cannot be read.
      options: of the judge.
      endpoint: whether it is behind one, so that one process alone asks.
    """

    def __init__(self, way: Way, options: JudgeOptions, *, endpoint: bool) -> None:
        self.way, self.options, self.endpoint = way, options, endpoint

    def identity(self) -> Mapping[str, Any]:
        """Everything that decides its ratings."""
        return self.way.identity()

    def stream(
        self,
        comparisons: Sequence[Comparison],
        *,
        profile_posts: int | None,
        skip: Callable[[Sequence[int]], bool],
        protocol: str | None = None,
        max_length: int | None = None,
    ) -> Iterator[ScoredBatch]:
        """Yield the ratings of some comparisons after the other; a rating that cannot be read is NaN.

        Raises:
          DataError: a comparison that does not fit, or has no rubric where one is asked for.
          RunError: an endpoint that refuses, is down or lies; an option that a judge does not have. All comparisons
            before the one that cannot be rated have been given.
        """
        if protocol not in (None, TextProtocol.DEFAULT):
            raise RunError(f"protocol: a judge has prompts of its own: leave it out, found {quote(protocol)}")
        way = self.way
        if max_length is not None:
            if not isinstance(way, ExpectedRatings):
                raise RunError("max_length: a judge that replies in words has its own limit: leave it out")
            way = replace(way, max_length=max_length)
        posts = self.options.posts if profile_posts is None else profile_posts
        for start in range(0, len(comparisons), TOGETHER):
            indices = range(start, min(start + TOGETHER, len(comparisons)))
            if skip(indices):
                continue
            part = comparisons[start : indices.stop]
            try:
                yield _batch(indices, way.judge(part, [0] * len(part), profile_posts=posts))
            except PrbError:
                # One after the other, so that the one at fault is known; replies that came are kept.
                for index, each in zip(indices, part, strict=True):
                    yield _batch([index], way.judge([each], [0], profile_posts=posts))


def open_judge(
    name: str,
    options: JudgeOptions | None = None,
    *,
    loading: LoadOptions | None = None,
    cache: Path,
    concurrency: int = 8,
) -> RatingScorer:
    """Open a judge that is named as `judge:MODEL` or `rubric:MODEL`; the key of an endpoint is in PRB_ENDPOINT_KEY.

    Args:
      name: of the judge.
      options: how it is asked; the protocol is that of the name, or the paper's where the options have its prompts.
      loading: of a model on this machine.
      cache: folder for the replies of an endpoint, which is asked nothing twice.
      concurrency: requests at a time.

    Raises:
      RunError: a name of no model, or options that do not go together.
      CheckpointError, MeshError: the model cannot be loaded, or be read in this way.
    """
    named, options = parse_judge(name), options or JudgeOptions()
    protocol = named.protocol if options.prompts is None else f"paper-{named.protocol}"
    options = replace(options, protocol=protocol)
    options.check(local=named.url is None)
    if named.url is None:
        return RatingScorer(
            local_way(named.model, options, loading or LoadOptions()), options, endpoint=False
        )
    asked = EndpointOptions(
        url=named.url, model=named.model, key=os.environ.get(KEY) or None, concurrency=concurrency
    )
    speaker = EndpointSpeaker(Endpoint(asked, cache=cache))
    return RatingScorer(spoken_way(speaker, options), options, endpoint=True)


def _batch(indices: Sequence[int], found: Sequence[Judgement]) -> ScoredBatch:
    return ScoredBatch(
        indices,
        [np.asarray(one.facts["ratings"], np.float32) for one in found],  # None is NaN
        [one.tokens for one in found],
        [Truncation(posts_dropped=one.posts_dropped) for one in found],
    )
