"""`prb judge`: comparisons judged by a language model, in a run folder as that of `prb evaluate`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from prb_jax.errors import PrbWarning
from prb_jax.judges.open_judge import open_judge
from prb_jax.judges.options import PAPERS, RUBRICS, JudgeOptions
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.remote.endpoint import REPLIES
from prb_jax.remote.options import EndpointOptions
from prb_jax.runs.evaluation import JUDGEMENTS
from prb_jax.scoring.evaluate import Evaluation, evaluate
from prb_jax.scoring.inputs import Data, Inputs, read_inputs
from prb_jax.scoring.prompt_extras import ORACLE, UPPER_BOUND, add_prompt_extras
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
    part: str | None = None,
    progress: bool = True,
) -> Evaluation:
    """Judge comparisons, and write a run folder as `prb_jax.evaluate` does, with the judgements beside the scores.

    Args:
      model: folder or hub id of a causal language model; None for an endpoint.
      data, out, subset, limit, name, part, progress: as of `prb_jax.evaluate`.
      options: how they are judged.
      endpoint: asked instead of a model on this machine.
      loading: how a model on this machine is opened.

    Raises:
      RunError: both or neither of model and endpoint; options that do not go together; an endpoint that refuses, is
        down or lies; and what `prb_jax.evaluate` raises.
      DataError: a comparison that is no pair (but for "score"), or too long.
    """
    options, folder = options or JudgeOptions(), Path(out)
    scorer = open_judge(model, options, endpoint=endpoint, loading=loading, cache=folder / REPLIES)
    result = evaluate(
        replace(scorer, folder=folder, name=name),
        _with_hints(read_inputs(data, subset=subset, limit=limit), options),
        out=out,
        profile_posts=options.posts,
        protocol=TextProtocol.PAPER if options.protocol in PAPERS else TextProtocol.DEFAULT,
        limit=limit,
        controls=options.controls,
        seed=options.seed,
        part=part,
        progress=progress,
    )
    if part is not None:
        return result
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


def _with_hints(inputs: Inputs, options: JudgeOptions) -> Inputs:
    """The inputs with all that the judge is told of the users; a rubric judge knows more than any model could."""
    told = add_prompt_extras(inputs, options.hints)
    if options.protocol not in RUBRICS:
        return told
    hints = dict(told.hints)
    bounds = [*hints.get(UPPER_BOUND, ()), "rubric"]
    return replace(told, hints={**hints, "rubric": {"kind": ORACLE, "without": 0}, UPPER_BOUND: bounds})
