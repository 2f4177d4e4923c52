"""`prb serve`: a reward model that answers HTTP requests until SIGTERM."""

from __future__ import annotations

import gc
import signal
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prb_jax.behaviour.judges.scorer import JudgeScorer
from prb_jax.errors import PrbWarning, RunError, printable
from prb_jax.models.continued import why_not_kept
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.extras import need_extra
from prb_jax.scoring.batching import machine_memory
from prb_jax.scoring.history import read_history
from prb_jax.scoring.remote import TOKEN
from prb_jax.scoring.remote.score_server import ScoreClient
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.scoring.scorer import Scorer
from prb_jax.serving.engine import Engine
from prb_jax.serving.item_scorer import JUDGED_AT_ONCE, comparison_scores, open_reward
from prb_jax.serving.options import ServeOptions
from prb_jax.serving.request_reader import RequestReader
from prb_jax.serving.scorer_engine import ScorerEngine
from prb_jax.serving.sizes import Sizes
from prb_jax.serving.tree_scorer import open_tree_scorer

if TYPE_CHECKING:
    from prb_jax.serving.app import ServedModel


MEGABYTE = 1_000_000

MOST_HELD = 64e9
"""Bytes of keys and values that are held at most where nobody says how many."""


def serve(
    model: str | Path, *, options: ServeOptions | None = None, loading: LoadOptions | None = None
) -> None:
    """Load a model, print its URL after warm-up, and answer requests until SIGTERM or Ctrl-C.

    The process ends at most 29 seconds after the signal, with any unfinished work.

    The model is any that `prb evaluate` accepts, or a judge: `judge:MODEL`, or `judge:URL#NAME` at an endpoint.

    Raises:
      RunError: If the address cannot be used, if other machines can reach it but no token is set, or if an option has
        no effect on this model.
      CheckpointError, MeshError: If the model cannot be loaded.
    """
    need_extra("serve", "prb serve")
    from prb_jax.serving.app import make_app
    from prb_jax.serving.connections import LAST_SECONDS, address, bind, run_app
    from prb_jax.serving.http_server import is_loopback

    options, loading = options or ServeOptions(), loading or LoadOptions()
    if options.token is None and not is_loopback(options.host):
        raise RunError(
            f"--host {options.host}: other machines could reach the server: set {TOKEN} to a token that "
            "clients must send"
        )
    listening = bind(options.host, options.port)
    # standard output is only for the address, which programs read
    print(
        f"loading {printable(str(model))}; it answers when its address is printed",
        file=sys.stderr,
        flush=True,
    )
    try:
        history = read_history(options.history)
        served = make_served(open_reward(model, loading, history=history, judge=options.judge), options)
        line = f"serving {model} at {address(listening)}"
        gc.collect()
        gc.freeze()  # each garbage collection of the model's objects would block all requests
        try:
            run_app(make_app(served), listening, limits=options.limits, ready=lambda: print(line, flush=True))
        finally:
            if served.close(LAST_SECONDS):
                signal.alarm(0)
    finally:
        listening.close()


def make_served(scorer: Scorer, options: ServeOptions) -> ServedModel:
    """Return the model of an application, with its engine running and a reward model's programs compiled.

    Raises:
      RunError: If an option has no effect on this scorer.
    """
    from prb_jax.serving.app import ServedModel, ServerMetrics

    metrics, identity, most = ServerMetrics(), scorer.identity(), options.limits.waiting
    if isinstance(scorer, RewardModel):
        held, why = _prefix_cache(scorer, options.prefix_cache)
        if why is not None:
            warnings.warn(
                f"{scorer.name} keeps no keys and values of prefixes: {why}; a prefix is computed again unless its "
                "requests wait together",
                PrbWarning,
                stacklevel=2,
            )
        trees = open_tree_scorer(scorer, options.view, batch_tokens=options.batch_tokens, prefix_cache=held)
        trees.compile()
        engine = Engine(trees, most=most, count=metrics.count_batch)
        view, name, shown, cache = trees.maker.view, scorer.name, True, trees.cache
        prefixes = {"prefix_cache": {"bytes": held, "reason": why}}
    else:
        if options.prefix_cache:
            raise RunError(
                f"--prefix-cache: {identity['name']} is no reward model whose keys and values can be kept"
            )
        score, view = comparison_scores(scorer, options.view, batch_tokens=options.batch_tokens)
        waits = isinstance(scorer, ScoreClient) or (isinstance(scorer, JudgeScorer) and scorer.endpoint)
        engine = ScorerEngine(score, most=most, at_once=JUDGED_AT_ONCE if waits else 1)
        name, shown, cache, prefixes = str(identity["name"]), bool(scorer.uses), None, dict[str, Any]()
    sizes = Sizes(
        items=options.limits.items,
        posts=view.profile_posts if shown else None,
        tokens=None if scorer.reader is None else scorer.reader.limit(view),
        cuts_responses=view.protocol.cuts_responses,
    )
    facts = {"identity": identity, "view": asdict(view), **prefixes}
    return ServedModel(name, engine, RequestReader(sizes), metrics, options, facts, cache)


def _prefix_cache(model: RewardModel, asked: int | None) -> tuple[int, str | None]:
    """Return the size of the prefix cache in bytes, and why the model keeps no prefixes although nobody refused them.

    `asked` is in megabytes; None picks a default, and 0 refuses the cache.

    Raises:
      RunError: If `asked` is above 0 and the model cannot keep keys and values; the message gives the reason.
    """
    if asked == 0:
        return 0, None
    why = "an encoder's states depend on what follows"
    if model.streams is not None:
        why = why_not_kept(model.decoder, model.mesh, model.streams)
    if why is not None and asked:
        raise RunError(f"--prefix-cache: {model.name} keeps no keys and values of prefixes: {why}")
    if why is not None:
        return 0, why
    return int(min(machine_memory() / 8, MOST_HELD)) if asked is None else asked * MEGABYTE, None
