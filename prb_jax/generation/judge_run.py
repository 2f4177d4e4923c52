"""Judge pairs by a language model that is given by name: on this machine, or behind an endpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prb_jax.errors import RunError
from prb_jax.generation.endpoint import KEY, Endpoint, EndpointOptions
from prb_jax.generation.judge import (
    BothOrders,
    EndpointSpeaker,
    JudgeScorer,
    PaperWay,
    PolicySpeaker,
    Speaker,
    Way,
)
from prb_jax.generation.verdicts import read_paper_prompts
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.scoring.by_name import evaluate
from prb_jax.scoring.evaluate import Evaluation
from prb_jax.scoring.read_inputs import Data
from prb_jax.text.protocol import TextProtocol, parse_protocol

REPLIES = "replies"
"""In the run folder: the replies of an endpoint, each under the digest of its request."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """How pairs are judged.

    Attributes:
      protocol: "default", both orders; or "paper", one order by a seeded coin, with the paper's parser.
      reason: of the default protocol: whether the judge thinks in words first.
      prompts: of the paper's protocol: the folder with its prompt files.
      profile_posts: at most this many posts of the user are shown; 10 if not given, and 0 for the paper protocol.
      max_length: longest conversation of a model on this machine, in tokens.
    """

    protocol: str = "default"
    reason: bool = False
    prompts: str | None = None
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
    """Judge pairs, and write a run folder as `prb_jax.evaluate` does, with the judgements beside the scores.

    Args:
      model: folder or hub id of a causal language model; None for an endpoint.
      data, out, subset, limit, name, progress, command: as of `prb_jax.evaluate`.
      options: how pairs are judged.
      endpoint: what is asked instead of a model on this machine.
      loading: how a model on this machine is opened.

    Raises:
      RunError: both or neither of model and endpoint; options that do not go together; an endpoint that refuses, is
        down or lies; and what `prb_jax.evaluate` raises.
      DataError: a comparison that is no pair, or too long.
    """
    options = options or JudgeOptions()
    if (model is None) == (endpoint is None):
        raise RunError("judge: expected either a MODEL, or --endpoint URL and --model NAME")
    protocol = parse_protocol(options.protocol)
    if (options.prompts is None) == (protocol is TextProtocol.PAPER):
        raise RunError("--prompts DIR: the paper protocol needs it, and the default one has its own prompts")
    if options.reason and protocol is TextProtocol.PAPER:
        raise RunError("--reason: the paper's prompts say how the judge replies: leave it out")
    folder, asked = Path(out), None
    if endpoint is None:
        assert model is not None
        way = _local(model, options, loading or LoadOptions(), paper=protocol is TextProtocol.PAPER)
    else:
        if options.max_length is not None:
            raise RunError("--max-length: an endpoint has its own limit: leave it out")
        asked = Endpoint(endpoint, cache=folder / REPLIES)
        way = _spoken(EndpointSpeaker(asked), options, paper=protocol is TextProtocol.PAPER)

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

    return evaluate(
        JudgeScorer(way, out=folder, name=name, usage=usage),
        data,
        out=out,
        profile_posts=options.profile_posts,
        protocol=options.protocol,
        subset=subset,
        limit=limit,
        progress=progress,
        command=command,
    )


def _local(model: str | Path, options: JudgeOptions, loading: LoadOptions, *, paper: bool) -> Way:
    if paper or options.reason:
        if options.max_length is not None:
            raise RunError(
                "--max-length: a judge that replies in words has the model's own limit: leave it out"
            )
        from prb_jax.generation.load import load_opened_policy
        from prb_jax.readouts.language_model import open_language_model

        policy = load_opened_policy(open_language_model(model, loading))
        return _spoken(PolicySpeaker(policy), options, paper=paper)
    from prb_jax.generation.judge_logits import load_logits_way

    return load_logits_way(model, loading, max_length=options.max_length)


def _spoken(speaker: Speaker, options: JudgeOptions, *, paper: bool) -> Way:
    if paper:
        assert options.prompts is not None
        return PaperWay(speaker, read_paper_prompts(options.prompts))
    return BothOrders(speaker, options.reason)


def _total(rows: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """The tokens of all replies; None where the endpoint did not tell those of one."""
    counts = [count for row in rows for count in row[key]]
    return None if None in counts else sum(counts)


def endpoint_options(
    url: str | None, model: str | None, *, concurrency: int, price: Sequence[float] | None
) -> EndpointOptions | None:
    """Return the options of an endpoint from a command line, with the key of the environment; None for none.

    Raises:
      RunError: one of URL and model without the other, or a price without them.
    """
    if url is None and model is None:
        if price is not None:
            raise RunError("--price: belongs to --endpoint URL")
        return None
    if url is None or model is None:
        raise RunError("--endpoint URL and --model NAME: expected both or neither")
    prices = None if price is None else (price[0], price[1])
    key = os.environ.get(KEY) or None
    return EndpointOptions(url=url, model=model, key=key, concurrency=concurrency, prices=prices)
