"""`prb serve`: a reward model that answers HTTP requests until SIGTERM."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

from prb_jax.errors import PrbWarning, RunError
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_model
from prb_jax.rl.remote import TOKEN
from prb_jax.scoring.batching import lanes
from prb_jax.scoring.reward_model import RewardModel, load_reward_model
from prb_jax.serving.app import Figures, Served, make_app
from prb_jax.serving.engine import Engine
from prb_jax.serving.fixed_shapes import shapes_for
from prb_jax.serving.http_server import Limits, address, bind, is_loopback, local_names, run_app
from prb_jax.serving.items import MOST_RESPONSES, TreeMaker
from prb_jax.text.view import ViewOptions


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where, to whom and how a model is served.

    Attributes:
      host: an address; beyond this machine's own loopback a token is required.
      port: 0 picks a free one.
      token: that clients must send; None for none.
      view: what the model is shown of a request.
      batch_tokens: tokens computed at a time, about; of the device if not given.
      limits: for clients.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    view: ViewOptions = field(default_factory=ViewOptions)
    batch_tokens: int | None = None
    limits: Limits = field(default_factory=Limits)


def serve(
    model: str | Path, *, options: ServeOptions | None = None, loading: LoadOptions | None = None
) -> None:
    """Load a model, print where it is served once it is warm, and answer requests until SIGTERM or Ctrl-C.

    Args:
      model: what `prb evaluate` takes, but for baselines.
      options: where, to whom and how.
      loading: how the model is opened.

    Raises:
      RunError: a baseline; the address cannot be used, or others could reach it and there is no token.
      CheckpointError, MeshError: the model cannot be loaded.
    """
    options, loading = options or ServeOptions(), loading or LoadOptions()
    if str(model).startswith("baseline:"):
        raise RunError(f"{model}: baselines are not served: expected a model")
    if options.token is None and not is_loopback(options.host):
        raise RunError(
            f"--host {options.host}: others than this machine could reach the server: set {TOKEN} to a token that "
            "clients must send"
        )
    listening = bind(options.host, options.port)
    try:
        engine, served = make_engine(load_reward_model(open_model(model, loading)), options=options)
        line = f"serving {model} at {address(listening)}"
        try:
            run_app(make_app(served), listening, limits=options.limits, ready=lambda: print(line, flush=True))
        finally:
            engine.close()
    finally:
        listening.close()


def make_engine(model: RewardModel, *, options: ServeOptions) -> tuple[Engine, Served]:
    """Compile a model's programs, and return the engine that scores with them and what an application serves."""
    view, figures = model.reader.view(options.view), Figures()
    for remark in model.reader.remarks(view.protocol):
        warnings.warn(remark, PrbWarning, stacklevel=2)
    shapes = shapes_for(model, longest=model.reader.limit(view), batch_tokens=options.batch_tokens)
    shapes.compile(model)
    engine = Engine(
        TreeMaker(model.reader, view, min(shapes.responses, MOST_RESPONSES)),
        shapes.batcher(),
        model.dispatch,
        tokens=shapes.tokens,
        most=options.limits.waiting,
        count=figures.count_batch,
        lanes=lanes(model.mesh),
    )
    return engine, Served(
        model.name,
        engine,
        figures,
        options.limits,
        token=options.token,
        hosts=local_names(options.host) if options.token is None else None,
        identity=model.identity(),
        view=asdict(view),
    )
