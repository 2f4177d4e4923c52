"""Judge by a language model that is given by name: on this machine, or behind an endpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prb_jax.errors import PrbWarning, RunError, quote
from prb_jax.generation.endpoint import REPLIES, Endpoint, EndpointOptions, check_one_model
from prb_jax.generation.judge import JUDGEMENTS, JudgeScorer, Way
from prb_jax.generation.judge_pairs import BothOrders, PaperWay
from prb_jax.generation.judge_ratings import SpokenRatings
from prb_jax.generation.ratings import Scale, read_template
from prb_jax.generation.speakers import EndpointSpeaker, Speaker, local_speaker
from prb_jax.generation.verdicts import read_paper_prompts
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.scoring import NO_CONTROLS
from prb_jax.scoring.by_name import evaluate
from prb_jax.scoring.evaluate import Evaluation
from prb_jax.scoring.hints import HintOptions, with_hints
from prb_jax.scoring.read_inputs import Data, read_inputs
from prb_jax.text.protocol import TextProtocol

SCORE = "score"
JUDGE_PROTOCOLS = (*map(str, TextProtocol), SCORE)
"""How a judge can be asked."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """How comparisons are judged.

    Attributes:
      protocol: "default", pairs in both orders; "paper", one order by a seeded coin, with the paper's parser; or
        "score", a number for each response by itself.
      reason: whether the judge thinks in words first; not with the paper's protocol.
      prompts: of the paper's protocol: the folder with its prompt files.
      template: of "score": a file with the text that asks for the number; the project's own one if not given.
      scale: of "score": the lowest and the highest number; 1 and 9 if not given.
      top_logprobs: of "score" at an endpoint: so many most probable tokens are asked for, and the score is the
        expected number; the number in the reply if not given.
      hints: what else the judge is told of the users; not with the paper's protocol.
      controls: the judge is asked again without the user ("blind"), with another one ("swap"), for "all" of these, or
        for "none".
      seed: of the other users of "swap".
      profile_posts: at most this many posts of the user are shown; 10 if not given, and 0 for the paper protocol.
      max_length: longest conversation of a model on this machine, in tokens.
    """

    protocol: str = "default"
    reason: bool = False
    prompts: str | None = None
    template: str | None = None
    scale: tuple[int, int] | None = None
    top_logprobs: int | None = None
    hints: HintOptions = field(default_factory=HintOptions)
    controls: str = NO_CONTROLS
    seed: int = 0
    profile_posts: int | None = None
    max_length: int | None = None


def judge(
    model: str | Path | None,
    data: Data,
    *,
    out: str | Path,
    options: JudgeOptions | None = None,
    endpoint: EndpointOptions | None = None,
    loading: LoadOptions | None = None,
    subset: str | None = None,
    limit: int | None = None,
    name: str | None = None,
    progress: bool = True,
    command: Sequence[str] = (),
) -> Evaluation:
    """Judge comparisons, and write a run folder as `prb_jax.evaluate` does, with the judgements beside the scores.

    Args:
      model: folder or hub id of a causal language model; None for an endpoint.
      data, out, subset, limit, name, progress, command: as of `prb_jax.evaluate`.
      options: how they are judged.
      endpoint: what is asked instead of a model on this machine.
      loading: how a model on this machine is opened.

    Raises:
      RunError: both or neither of model and endpoint; options that do not go together; an endpoint that refuses, is
        down or lies; and what `prb_jax.evaluate` raises.
      DataError: a comparison that is no pair (but for "score"), or too long.
    """
    options = options or JudgeOptions()
    check_one_model(model, endpoint, verb="judge")
    _check(options, local=endpoint is None)
    folder, asked = Path(out), None
    if endpoint is None:
        assert model is not None
        way = _local(model, options, loading or LoadOptions())
    else:
        asked = Endpoint(endpoint, cache=folder / REPLIES)
        way = _spoken(EndpointSpeaker(asked), options)

    def usage(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if asked is None:
            return {}
        prompts, replies = (_total(rows, key) for key in ("prompt_tokens", "completion_tokens"))
        return {
            "requests": sum(len(row["replies"]) for row in rows),
            "prompt_tokens": prompts,
            "completion_tokens": replies,
            "cost_dollars": asked.cost(prompts, replies),
        }

    result = evaluate(
        JudgeScorer(way, out=folder, name=name, usage=usage),
        with_hints(read_inputs(data, subset=subset, limit=limit), options.hints),
        out=out,
        profile_posts=options.profile_posts,
        protocol=TextProtocol.PAPER if options.protocol == TextProtocol.PAPER else TextProtocol.DEFAULT,
        limit=limit,
        controls=options.controls,
        seed=options.seed,
        progress=progress,
        command=command,
    )
    judged = result.summary["judge"]
    if judged.get("unparsable", judged.get("failed_parses")) == judged["n"]:
        warnings.warn(
            f"{result.summary['model']}: no comparison could be judged, for replies could not be read: see "
            f"{folder / JUDGEMENTS}",
            PrbWarning,
            stacklevel=2,
        )
    return result


def _check(options: JudgeOptions, *, local: bool) -> None:
    """Raise RunError for options that do not go together."""
    if options.protocol not in JUDGE_PROTOCOLS:
        known = ", ".join(JUDGE_PROTOCOLS)
        raise RunError(f"--protocol: expected one of {known}, found {quote(options.protocol)}")
    paper, score = options.protocol == TextProtocol.PAPER, options.protocol == SCORE
    if (options.prompts is None) == paper:
        raise RunError("--prompts DIR: the paper protocol needs it, and the others have their own prompts")
    if paper and options.hints.given:
        names = ", ".join(f"--{name}" for name in options.hints.given)
        raise RunError(f"{names}: the paper's prompts have no place for them: leave it out")
    if options.reason and paper:
        raise RunError("--reason: the paper's prompts say how the judge replies: leave it out")
    for flag, value in (
        ("--template", options.template),
        ("--scale", options.scale),
        ("--top-logprobs", options.top_logprobs),
    ):
        if value is not None and not score:
            raise RunError(f"{flag}: belongs to --protocol {SCORE}: leave it out")
    if options.top_logprobs is not None and local:
        raise RunError("--top-logprobs: a MODEL on this machine tells all probabilities: leave it out")
    if options.top_logprobs is not None and options.top_logprobs < 1:
        raise RunError(f"--top-logprobs: expected a number above 0, found {options.top_logprobs}")
    if options.max_length is not None and not local:
        raise RunError("--max-length: an endpoint has its own limit: leave it out")
    if options.max_length is not None and (paper or options.reason):
        raise RunError("--max-length: a judge that replies in words has the model's own limit: leave it out")


def _local(model: str | Path, options: JudgeOptions, loading: LoadOptions) -> Way:
    if options.protocol == TextProtocol.PAPER or options.reason:
        return _spoken(local_speaker(model, loading), options)
    if options.protocol == SCORE:
        from prb_jax.generation.judge_ratings import load_expected_ratings

        return load_expected_ratings(
            model,
            loading,
            template=read_template(options.template, reason=False),
            scale=Scale(*options.scale or ()),
            max_length=options.max_length,
        )
    from prb_jax.generation.judge_logits import load_logits_way

    return load_logits_way(model, loading, max_length=options.max_length)


def _spoken(speaker: Speaker, options: JudgeOptions) -> Way:
    if options.protocol == SCORE:
        return SpokenRatings(
            speaker,
            read_template(options.template, reason=options.reason),
            Scale(*options.scale or ()),
            reason=options.reason,
            alternatives=options.top_logprobs,
        )
    if options.protocol == TextProtocol.PAPER:
        assert options.prompts is not None
        return PaperWay(speaker, read_paper_prompts(options.prompts))
    return BothOrders(speaker, options.reason)


def _total(rows: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """The tokens of all replies; None where the endpoint did not tell those of one."""
    counts = [count for row in rows for count in row[key]]
    return None if None in counts else sum(counts)
