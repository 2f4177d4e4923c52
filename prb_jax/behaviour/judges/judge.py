"""Open judges from options or from the name of a reward; `prb judge`: a language model judges comparisons."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

from prb_jax.behaviour.judges.chat import Drawing, InWords, open_chat
from prb_jax.behaviour.judges.formats import GENERATIVE, TOKENS, find_generative
from prb_jax.behaviour.judges.generative import open_generative
from prb_jax.behaviour.judges.groups import GroupJudge
from prb_jax.behaviour.judges.names import ALL_PAIRS, RUBRIC, SCORE
from prb_jax.behaviour.judges.options import (
    PAPERS,
    RANKING,
    RUBRICS,
    JudgeOptions,
    generative_of,
    parse_judge,
)
from prb_jax.behaviour.judges.pairs import LETTER_TOKENS, MIN_MASS, REASON_TOKENS, PairJudge, load_letters
from prb_jax.behaviour.judges.paper import open_paper_judge
from prb_jax.behaviour.judges.ranking import RankJudge
from prb_jax.behaviour.judges.ratings import RUBRIC_SCALE, Ratings, load_numbers, read_template
from prb_jax.behaviour.judges.scale import Scale
from prb_jax.behaviour.judges.scorer import JudgeProtocol, JudgeScorer
from prb_jax.errors import PrbWarning, RunError
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.processes.refusals import refuse_together
from prb_jax.scoring import UPPER_BOUND
from prb_jax.scoring.evaluate import Evaluation, run_evaluation
from prb_jax.scoring.inputs import Inputs, read_inputs
from prb_jax.scoring.options import Data, EvaluateOptions
from prb_jax.scoring.prompt_extras import ORACLE, add_prompt_extras
from prb_jax.scoring.remote.endpoint import REPLIES, Endpoint
from prb_jax.scoring.remote.options import KEY, EndpointOptions
from prb_jax.scoring.same_choices import check_same_choices
from prb_jax.text.view import TextProtocol, ViewOptions


def open_judge(
    model: str | Path | None,
    options: JudgeOptions,
    *,
    endpoint: EndpointOptions | None = None,
    loading: LoadOptions | None = None,
    cache: Path | None,
) -> JudgeScorer:
    """Open a judge: a model on this machine, or one behind an endpoint whose replies are kept in ``cache``, if given.

    Raises:
      RunError: both or neither of model and endpoint are given, options conflict, or a file in the options cannot be
        read.
      CheckpointError, MeshError: the model cannot be loaded, or cannot be read in this way.
    """
    loading, local = loading or LoadOptions(), endpoint is None
    options.check(local=local)
    variables = options.template_variables
    if local and variables:
        loading = replace(loading, template_variables=variables)
    if endpoint is not None and endpoint.no_temperature and options.temperature not in (0, 1):
        raise RunError(
            f"--no-temperature: replies are drawn at {options.temperature:g}: expected --temperature 1"
        )
    chat = None
    row = GENERATIVE.get(options.protocol)
    if not local or options.protocol in PAPERS or options.reason or row is not None or model is None:
        drawn = options.temperature > 0
        chat = open_chat(model, endpoint=endpoint, loading=loading, cache=cache, verb="judge", exact=drawn)
    length = options.max_length
    in_words = partial(
        InWords,
        max_new_tokens=options.reason_tokens
        or (TOKENS if row is not None else REASON_TOKENS if options.reason else LETTER_TOKENS),
        drawing=Drawing(options.temperature, options.votes, options.seed) if options.temperature else None,
        template_variables={} if local else variables,
        limited=options.reason_tokens is not None,
    )
    if options.protocol in PAPERS:
        assert chat is not None
        assert options.prompts is not None
        protocol: JudgeProtocol = open_paper_judge(
            chat, options.protocol, prompts=options.prompts, template=options.template
        )
    elif options.protocol == RANKING:
        assert chat is not None
        protocol = RankJudge(in_words(chat), options.reason, options.seed)
    elif row is not None:
        assert chat is not None
        protocol = open_generative(row, in_words(chat, alternatives=options.top_logprobs), options)
    elif options.protocol in (SCORE, RUBRIC):
        rubric = options.protocol == RUBRIC
        template = read_template(
            options.template, reason=options.reason, system=options.system, rubric=rubric
        )
        scale = Scale(*RUBRIC_SCALE) if rubric else Scale(*options.scale or ())
        if chat is not None:
            reader = in_words(chat, alternatives=options.top_logprobs)
        else:
            assert model is not None
            reader = load_numbers(model, loading, scale, max_length=length)
        protocol = Ratings(reader, template, scale, options.reason)
    elif chat is not None:
        protocol = PairJudge(in_words(chat), options.reason)
    else:
        assert model is not None
        letters = load_letters(model, loading, max_length=length)
        protocol = PairJudge(letters, min_mass=MIN_MASS if options.min_mass is None else options.min_mass)
    if options.pairing is not None:
        assert isinstance(protocol, PairJudge)
        protocol = GroupJudge(protocol, options.pairing, options.ties, options.seed)
    asked = chat if isinstance(chat, Endpoint) else None
    return JudgeScorer(protocol=protocol, posts=options.posts, endpoint=asked)


def open_named_judge(
    name: str,
    options: JudgeOptions | None = None,
    *,
    loading: LoadOptions | None = None,
    cache: Path | None,
    concurrency: int = 8,
) -> JudgeScorer:
    """Open a judge that is named as a reward, for example `judge:MODEL`; the key of an endpoint is in PRB_ENDPOINT_KEY.

    Args:
      name: Name of the judge.
      options: Options of the judge. The name decides the protocol; if the options contain the paper's prompts, it is
        the paper's variant. A generative reward model (`GENERATIVE_MODELS`) is prompted in its own format.
      loading: Options to open a model on this machine.
      cache: Folder for the replies of an endpoint, so no request is repeated; None keeps no replies.
      concurrency: Number of concurrent requests.

    Raises:
      RunError: the name contains no model, or options conflict.
      CheckpointError, MeshError: the model cannot be loaded, or cannot be read in this way.
    """
    judge, options = parse_judge(name), options or JudgeOptions()
    protocol, row = judge.protocol, generative_of(judge)
    if protocol == TextProtocol.DEFAULT:
        if options.prompts is not None:
            raise RunError(f"--prompts: the paper's judge of pairs gives no reward, {name}: leave it out")
        if row is None or not row.listwise:
            options = replace(options, pairing=options.pairing or ALL_PAIRS)
    elif options.prompts is not None:
        protocol = f"paper-{protocol}"
    protocol = protocol if row is None or options.prompts is not None else row.name
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
    """Judge comparisons, and write a run folder like `prb_jax.evaluate`, with judgements in addition to scores.

    Several processes judge together with a model on this machine, and process 0 writes.

    Args:
      model: Folder or hub id of a causal language model; None for an endpoint.
      data, out, subset, limit, name, part, progress: Same as for `prb_jax.evaluate`.
      options: How comparisons are judged.
      endpoint: Endpoint to use instead of a model on this machine.
      loading: Options to open a model on this machine.

    Raises:
      RunError: both or neither of model and endpoint are given; options conflict; an endpoint rejects a request, is
        down or returns something malformed; or `prb_jax.evaluate` raises it.
      DataError: a comparison is not a pair (except for "score", "rubric", "ranking" and groups), or is too long.
    """
    options, folder = options or JudgeOptions(), Path(out)
    name_of_model = str(model) if endpoint is None else endpoint.model
    known = find_generative(name_of_model)
    if known is not None and options.protocol not in GENERATIVE:
        problem = f"is a generative reward model with a format of its own: expected --protocol {known.name}"
        warnings.warn(f"{name_of_model}: {problem}", PrbWarning, stacklevel=2)
    refuse_together(endpoint=endpoint, part=part)
    if model is not None:
        asked = {"protocol": options.protocol, "reason": options.reason, "posts": options.posts}
        check_same_choices("judge", {"model": (model, loading)}, asked)
    scorer = open_judge(model, options, endpoint=endpoint, loading=loading, cache=folder / REPLIES)
    view = ViewOptions(
        profile_posts=options.posts,
        protocol=TextProtocol.PAPER if options.protocol in PAPERS else TextProtocol.DEFAULT,
    )
    result = run_evaluation(
        replace(scorer, folder=folder, name=name),
        _with_hints(read_inputs(data, subset=subset, limit=limit), options),
        EvaluateOptions(
            out=out,
            view=view,
            limit=limit,
            controls=options.controls,
            seed=options.seed,
            part=part,
            progress=progress,
        ),
    )
    judged = result.summary.get("judge", {})  # missing in the summary of a part
    if "warning" in judged:
        warnings.warn(f"{result.summary['model']}: {judged['warning']}", PrbWarning, stacklevel=2)
    return result


def _with_hints(inputs: Inputs, options: JudgeOptions) -> Inputs:
    """Return the inputs with all hints about the users; a rubric judge is an upper bound, as it sees the rubric."""
    told = add_prompt_extras(inputs, options.hints)
    if options.protocol not in RUBRICS:
        return told
    hints = dict(told.hints)
    bounds = [*hints.get(UPPER_BOUND, ()), "rubric"]
    return replace(told, hints={**hints, "rubric": {"kind": ORACLE, "without": 0}, UPPER_BOUND: bounds})
