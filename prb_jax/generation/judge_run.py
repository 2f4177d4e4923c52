"""Judge by a language model that is given by name: on this machine, or behind an endpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prb_jax.errors import PrbWarning
from prb_jax.generation.endpoint import REPLIES, Endpoint, EndpointOptions, check_one_model
from prb_jax.generation.judge import JUDGEMENTS, JudgeScorer
from prb_jax.generation.judge_ways import PAPERS, RUBRICS, JudgeOptions, local_way, spoken_way
from prb_jax.generation.speakers import EndpointSpeaker
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.scoring.evaluate import Evaluation, evaluate
from prb_jax.scoring.inputs import Data, Inputs, read_inputs
from prb_jax.scoring.prompt_extras import ORACLE, UPPER_BOUND, with_hints
from prb_jax.text.protocol import TextProtocol


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
) -> Evaluation:
    """Judge comparisons, and write a run folder as `prb_jax.evaluate` does, with the judgements beside the scores.

    Args:
      model: folder or hub id of a causal language model; None for an endpoint.
      data, out, subset, limit, name, progress: as of `prb_jax.evaluate`.
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
    options.check(local=endpoint is None)
    folder, asked = Path(out), None
    if endpoint is None:
        assert model is not None
        way = local_way(model, options, loading or LoadOptions())
    else:
        asked = Endpoint(endpoint, cache=folder / REPLIES)
        way = spoken_way(EndpointSpeaker(asked), options)

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
        _told(read_inputs(data, subset=subset, limit=limit), options),
        out=out,
        profile_posts=options.posts,
        protocol=TextProtocol.PAPER if options.protocol in PAPERS else TextProtocol.DEFAULT,
        limit=limit,
        controls=options.controls,
        seed=options.seed,
        progress=progress,
    )
    judged = result.summary["judge"]
    replies = judged.get("ratings", judged["n"])
    unread = judged.get("unparsable") == judged["n"] or judged.get("failed_parses") == replies
    if unread and judged.get("low_letter_mass") == judged["n"]:
        why = (
            f"the model would reply with neither A nor B, whose probability is {judged['mean_letter_mass']:.2g} in the "
            "mean (--min-mass, --reason)"
        )
    else:
        why = "replies could not be read"
    if unread:
        problem = f"no comparison could be judged, for {why}: see {folder / JUDGEMENTS}"
        warnings.warn(f"{result.summary['model']}: {problem}", PrbWarning, stacklevel=2)
    if "warning" in judged:
        warnings.warn(f"{result.summary['model']}: {judged['warning']}", PrbWarning, stacklevel=2)
    return result


def _told(inputs: Inputs, options: JudgeOptions) -> Inputs:
    """The inputs with what the judge is told of the users; a rubric judge is told what no model could know."""
    told = with_hints(inputs, options.hints)
    if options.protocol not in RUBRICS:
        return told
    hints = dict(told.hints)
    bounds = [*hints.get(UPPER_BOUND, ()), "rubric"]
    return replace(told, hints={**hints, "rubric": {"kind": ORACLE, "without": 0}, UPPER_BOUND: bounds})


def _total(rows: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """The tokens of all replies; None where the endpoint did not tell those of one."""
    counts = [count for row in rows for count in row[key]]
    return None if None in counts else sum(counts)
