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
    from prb_jax.auditing.audit import audit
    from prb_jax.auditing.export import audit_export
    from prb_jax.auditing.report import audit_report
    from prb_jax.building.build import Build, build
    from prb_jax.data.comparison import Comparison, Message, Post, RubricAspect
    from prb_jax.errors import CheckpointError, DataError, MeshError, PrbError, PrbWarning, RunError
    from prb_jax.generation.aspects import plan_aspects
    from prb_jax.generation.guide import guide
    from prb_jax.generation.judge_run import judge
    from prb_jax.generation.load import load_policy
    from prb_jax.generation.policy import Policy, Sample
    from prb_jax.generation.policy_accuracy import policy_accuracy
    from prb_jax.reports.comparison import compare
    from prb_jax.reports.correlation import correlate
    from prb_jax.reports.leaderboard import leaderboard
    from prb_jax.reports.page import report
    from prb_jax.reports.push import push
    from prb_jax.rl.ppo import PpoResult, ppo
    from prb_jax.scoring.evaluate import Evaluation, evaluate
    from prb_jax.scoring.load import load
    from prb_jax.scoring.posts import PostsSweep, evaluate_posts
    from prb_jax.scoring.reward_model import RewardModel
    from prb_jax.serving.reward_fn import reward_fn
    from prb_jax.sources.reading import read_comparisons
    from prb_jax.sources.split import split
    from prb_jax.study.ask import Question, ask
    from prb_jax.study.personalise import Study, personalise
    from prb_jax.study.write_features import write_features
    from prb_jax.training.train import TrainResult, train

_HOMES = {
    "Build": "prb_jax.building.build",
    "build": "prb_jax.building.build",
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
    "Question": "prb_jax.study.ask",
    "ask": "prb_jax.study.ask",
    "Evaluation": "prb_jax.scoring.evaluate",
    "evaluate": "prb_jax.scoring.evaluate",
    "PostsSweep": "prb_jax.scoring.posts",
    "evaluate_posts": "prb_jax.scoring.posts",
    "report": "prb_jax.reports.page",
    "push": "prb_jax.reports.push",
    "RewardModel": "prb_jax.scoring.reward_model",
    "load": "prb_jax.scoring.load",
    "judge": "prb_jax.generation.judge_run",
    "plan_aspects": "prb_jax.generation.aspects",
    "guide": "prb_jax.generation.guide",
    "load_policy": "prb_jax.generation.load",
    "Policy": "prb_jax.generation.policy",
    "Sample": "prb_jax.generation.policy",
    "policy_accuracy": "prb_jax.generation.policy_accuracy",
    "compare": "prb_jax.reports.comparison",
    "correlate": "prb_jax.reports.correlation",
    "leaderboard": "prb_jax.reports.leaderboard",
    "reward_fn": "prb_jax.serving.reward_fn",
    "audit": "prb_jax.auditing.audit",
    "audit_export": "prb_jax.auditing.export",
    "audit_report": "prb_jax.auditing.report",
    "split": "prb_jax.sources.split",
    "PpoResult": "prb_jax.rl.ppo",
    "ppo": "prb_jax.rl.ppo",
    "Study": "prb_jax.study.personalise",
    "personalise": "prb_jax.study.personalise",
    "write_features": "prb_jax.study.write_features",
    "TrainResult": "prb_jax.training.train",
    "train": "prb_jax.training.train",
}

__all__ = [
    "Build",
    "CheckpointError",
    "Comparison",
    "DataError",
    "Evaluation",
    "MeshError",
    "Message",
    "Policy",
    "Post",
    "PostsSweep",
    "PpoResult",
    "PrbError",
    "PrbWarning",
    "Question",
    "RewardModel",
    "RubricAspect",
    "RunError",
    "Sample",
    "Study",
    "TrainResult",
    "__version__",
    "ask",
    "audit",
    "audit_export",
    "audit_report",
    "build",
    "compare",
    "correlate",
    "evaluate",
    "evaluate_posts",
    "guide",
    "judge",
    "leaderboard",
    "load",
    "load_policy",
    "personalise",
    "plan_aspects",
    "policy_accuracy",
    "ppo",
    "push",
    "read_comparisons",
    "report",
    "reward_fn",
    "split",
    "train",
    "write_features",
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
