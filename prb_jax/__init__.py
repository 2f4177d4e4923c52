"""Evaluate and train reward models for individual people, on JAX.

    import prb_jax as prb
    rm = prb.load("path-or-hub-id")
    scores = rm.score([prb.Comparison(id="1", question="Hello?", responses=["Hi.", "Go away."])])

The public names below are imported on first use, so that ``import prb_jax`` (and ``prb --help``)
starts neither JAX nor a tokenizer library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prb_jax.version import __version__

if TYPE_CHECKING:
    from prb_jax.data.comparison import Comparison, Message, Post, RubricAspect
    from prb_jax.errors import CheckpointError, DataError, MeshError, PrbError, PrbWarning, RunError
    from prb_jax.generation.load import load_policy
    from prb_jax.generation.policy import Policy, Sample
    from prb_jax.reports.comparison import compare
    from prb_jax.reports.leaderboard import leaderboard
    from prb_jax.reports.page import report
    from prb_jax.reports.push import push
    from prb_jax.scoring.by_name import evaluate
    from prb_jax.scoring.evaluate import Evaluation
    from prb_jax.scoring.load import load
    from prb_jax.scoring.posts import PostsSweep, evaluate_posts
    from prb_jax.scoring.reward_model import RewardModel
    from prb_jax.sources.reading import read_comparisons
    from prb_jax.sources.split import split
    from prb_jax.training.train import TrainResult, train

_HOMES = {
    "Comparison": "prb_jax.data.comparison",
    "Message": "prb_jax.data.comparison",
    "Post": "prb_jax.data.comparison",
    "RubricAspect": "prb_jax.data.comparison",
    "read_comparisons": "prb_jax.sources.reading",
    "PrbError": "prb_jax.errors",
    "DataError": "prb_jax.errors",
    "CheckpointError": "prb_jax.errors",
    "MeshError": "prb_jax.errors",
    "PrbWarning": "prb_jax.errors",
    "RunError": "prb_jax.errors",
    "Evaluation": "prb_jax.scoring.evaluate",
    "evaluate": "prb_jax.scoring.by_name",
    "PostsSweep": "prb_jax.scoring.posts",
    "evaluate_posts": "prb_jax.scoring.posts",
    "report": "prb_jax.reports.page",
    "push": "prb_jax.reports.push",
    "RewardModel": "prb_jax.scoring.reward_model",
    "load": "prb_jax.scoring.load",
    "load_policy": "prb_jax.generation.load",
    "Policy": "prb_jax.generation.policy",
    "Sample": "prb_jax.generation.policy",
    "compare": "prb_jax.reports.comparison",
    "leaderboard": "prb_jax.reports.leaderboard",
    "split": "prb_jax.sources.split",
    "TrainResult": "prb_jax.training.train",
    "train": "prb_jax.training.train",
}

__all__ = [
    "CheckpointError",
    "Comparison",
    "DataError",
    "Evaluation",
    "MeshError",
    "Message",
    "Policy",
    "Post",
    "PostsSweep",
    "PrbError",
    "PrbWarning",
    "RewardModel",
    "RubricAspect",
    "RunError",
    "Sample",
    "TrainResult",
    "__version__",
    "compare",
    "evaluate",
    "evaluate_posts",
    "leaderboard",
    "load",
    "load_policy",
    "push",
    "read_comparisons",
    "report",
    "split",
    "train",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
