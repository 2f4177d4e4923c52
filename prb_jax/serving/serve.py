"""`prb serve`: a reward model that answers HTTP requests until SIGTERM."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from prb_jax.errors import PrbWarning, RunError, need_extra
from prb_jax.judges.scorer import JudgeScorer
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.remote.score_server import TOKEN, ScoreClient
from prb_jax.scoring.batching import lanes
from prb_jax.scoring.load import read_history
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.scoring.scorer import Scorer
from prb_jax.serving.engine import Engine, ScorerEngine
from prb_jax.serving.fixed_shapes import shapes_for
from prb_jax.serving.item_scorer import JUDGED_AT_ONCE, comparison_scores, open_reward
from prb_jax.serving.items import MOST_RESPONSES, TreeMaker
from prb_jax.serving.options import ServeOptions

if TYPE_CHECKING:
    from prb_jax.serving.app import Served


def serve(
    model: str | Path, *, options: ServeOptions | None = None, loading: LoadOptions | None = None
) -> None:
    """Load a model, print where it is served once it is warm, and answer requests until SIGTERM or Ctrl-C.

    Args:
      model: what `prb evaluate` takes, or a judge: `judge:MODEL`, or `judge:URL#NAME` at an endpoint.
      options: where, to whom and how.
      loading: how the model is opened.

    Raises:
      RunError: the address cannot be used, others could reach it and there is no token, or an option has no effect on
        this model.
      CheckpointError, MeshError: the model cannot be loaded.
    """
    need_extra("serve", "prb serve")
    from prb_jax.serving.app import make_app
    from prb_jax.serving.http_server import address, bind, is_loopback, run_app

    options, loading = options or ServeOptions(), loading or LoadOptions()
    if options.token is None and not is_loopback(options.host):
        raise RunError(
            f"--host {options.host}: others than this machine could reach the server: set {TOKEN} to a token that "
            "clients must send"
        )
    listening = bind(options.host, options.port)
    try:
        engine, served = make_engine(
            open_reward(model, loading, history=read_history(options.history), judge=options.judge),
            options=options,
        )
        line = f"serving {model} at {address(listening)}"
        try:
            run_app(make_app(served), listening, limits=options.limits, ready=lambda: print(line, flush=True))
        finally:
            engine.close()
    finally:
        listening.close()


def make_engine(scorer: Scorer, *, options: ServeOptions) -> tuple[Engine | ScorerEngine, Served]:
    """Return the engine that scores, with the programs of a reward model compiled, and what an application serves.

    Raises:
      RunError: an option has no effect on this scorer.
    """
    from prb_jax.serving.app import Figures, Served
    from prb_jax.serving.http_server import local_names

    figures, identity = Figures(), scorer.identity()
    if isinstance(scorer, RewardModel):
        view = scorer.reader.view(options.view)
        for remark in scorer.reader.remarks(view.protocol):
            warnings.warn(remark, PrbWarning, stacklevel=2)
        shapes = shapes_for(scorer, longest=scorer.reader.limit(view), batch_tokens=options.batch_tokens)
        shapes.compile(scorer)
        engine = Engine(
            TreeMaker(scorer.reader, view, min(shapes.responses, MOST_RESPONSES)),
            shapes.batcher(),
            scorer.dispatch,
            tokens=shapes.tokens,
            most=options.limits.waiting,
            count=figures.count_batch,
            lanes=lanes(scorer.mesh),
        )
    else:
        score, view = comparison_scores(scorer, options.view, batch_tokens=options.batch_tokens)
        waits = isinstance(scorer, ScoreClient) or (isinstance(scorer, JudgeScorer) and scorer.endpoint)
        engine = ScorerEngine(score, most=options.limits.waiting, at_once=JUDGED_AT_ONCE if waits else 1)
    return engine, Served(
        scorer.name if isinstance(scorer, RewardModel) else str(identity["name"]),
        engine,
        figures,
        options.limits,
        token=options.token,
        hosts=local_names(options.host) if options.token is None else None,
        identity=identity,
        view=asdict(view),
    )
