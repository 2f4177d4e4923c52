"""The scorer of a judge, as options or the name of a reward ask for it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from prb_jax.judges.chat import ChatModel, EndpointChat, open_chat
from prb_jax.judges.options import PAPERS, RUBRIC, SCORE, JudgeOptions, parse_judge
from prb_jax.judges.pairs import PairsInWords, load_pairs_by_logits
from prb_jax.judges.paper import open_paper_judge
from prb_jax.judges.rating_template import RUBRIC_SCALE, RatingTemplate, RubricTemplate, Scale, read_template
from prb_jax.judges.ratings import RatingsInWords, load_ratings_by_logits
from prb_jax.judges.scorer import JudgeProtocol, JudgeScorer
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.remote.options import KEY, EndpointOptions


def open_judge(
    model: str | Path | None,
    options: JudgeOptions,
    *,
    endpoint: EndpointOptions | None = None,
    loading: LoadOptions | None = None,
    cache: Path | None,
    verb: str = "judge",
) -> JudgeScorer:
    """Open a judge, a model on this machine or one behind an endpoint, whose replies are kept in ``cache``, if given.

    Raises:
      RunError: both or neither of model and endpoint, options that do not go together, or a file of them that cannot be
        read.
      CheckpointError, MeshError: the model cannot be loaded, or be read in this way.
    """
    loading, local = loading or LoadOptions(), endpoint is None
    in_words = not local or options.protocol in PAPERS or options.reason
    if in_words or model is None:
        options.check(local=local)
        chat = open_chat(model, endpoint=endpoint, loading=loading, cache=cache, verb=verb)
        asked = chat.endpoint if isinstance(chat, EndpointChat) else None
        return JudgeScorer(protocol=_in_words(chat, options), posts=options.posts, endpoint=asked)
    options.check(local=True)
    if options.protocol in (SCORE, RUBRIC):
        protocol = load_ratings_by_logits(
            model, loading, template=_template(options), scale=_scale(options), max_length=options.max_length
        )
    else:
        protocol = load_pairs_by_logits(
            model, loading, max_length=options.max_length, min_mass=options.min_mass
        )
    return JudgeScorer(protocol=protocol, posts=options.posts)


def open_named_judge(
    name: str,
    options: JudgeOptions | None = None,
    *,
    loading: LoadOptions | None = None,
    cache: Path | None,
    concurrency: int = 8,
) -> JudgeScorer:
    """Open a judge that is named as a reward, for example `judge:MODEL`; an endpoint's key is in PRB_ENDPOINT_KEY.

    Args:
      name: of the judge.
      options: how it is asked; the protocol is that of the name, or the paper's where the options have its prompts.
      loading: of a model on this machine.
      cache: folder for the replies of an endpoint, which is asked nothing twice; None keeps none.
      concurrency: requests at a time.

    Raises:
      RunError: a name of no model, or options that do not go together.
      CheckpointError, MeshError: the model cannot be loaded, or be read in this way.
    """
    judge, options = parse_judge(name), options or JudgeOptions()
    protocol = judge.protocol if options.prompts is None else f"paper-{judge.protocol}"
    endpoint = None
    if judge.url is not None:
        key = os.environ.get(KEY) or None
        endpoint = EndpointOptions(url=judge.url, model=judge.model, key=key, concurrency=concurrency)
    return open_judge(
        judge.model if endpoint is None else None,
        replace(options, protocol=protocol),
        endpoint=endpoint,
        loading=loading,
        cache=cache,
    )


def _in_words(chat: ChatModel, options: JudgeOptions) -> JudgeProtocol:
    if options.protocol in (SCORE, RUBRIC):
        return RatingsInWords(
            chat,
            _template(options),
            _scale(options),
            reason=options.reason,
            alternatives=options.top_logprobs,
        )
    if options.protocol not in PAPERS:
        return PairsInWords(chat, options.reason)
    assert options.prompts is not None
    return open_paper_judge(chat, options.protocol, prompts=options.prompts, template=options.template)


def _template(options: JudgeOptions) -> RatingTemplate:
    kind = RubricTemplate if options.protocol == RUBRIC else RatingTemplate
    return read_template(options.template, reason=options.reason, system=options.system, kind=kind)


def _scale(options: JudgeOptions) -> Scale:
    return Scale(*RUBRIC_SCALE) if options.protocol == RUBRIC else Scale(*options.scale or ())
