"""Evaluate and train reward models for individual people, on JAX.

    import prb_jax as prb
    rm = prb.load("path-or-hub-id")
    scores = rm.score([prb.Comparison(id="1", question="Hello?", responses=["Hi.", "Go away."])])

The public names below are imported on first use, so that ``import prb_jax`` (and ``prb --help``)
starts neither JAX nor a tokenizer library.
"""

import logging
import sys
import warnings
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

from prb_jax.version import __version__

# transformers says that it cannot do without PyTorch; here it only reads tokenizers and configurations.
logging.getLogger("transformers").addFilter(
    lambda record: not record.getMessage().startswith("PyTorch was not found")
)

if TYPE_CHECKING:
    from prb_jax.auditing.audit import audit
    from prb_jax.auditing.judgements import audit_export
    from prb_jax.auditing.report import audit_report
    from prb_jax.building.build import Build, build
    from prb_jax.building.settings import BuildSettings
    from prb_jax.data.comparison import Comparison, Message, Post, RubricAspect
    from prb_jax.errors import CheckpointError, DataError, MeshError, PrbError, PrbWarning, RunError
    from prb_jax.generation.guide import guide
    from prb_jax.generation.policy import Policy, Sample, load_policy
    from prb_jax.generation.policy_accuracy import PolicyAccuracy, policy_accuracy
    from prb_jax.generation.rules import SampleOptions
    from prb_jax.generation.sample import SampleRun, sample_data
    from prb_jax.inspection.inspect import inspect
    from prb_jax.judges.aspects import plan_aspects
    from prb_jax.judges.best_of_n import BestOfN, best_of_n
    from prb_jax.judges.distil import Distilled, distil
    from prb_jax.judges.judge import judge
    from prb_jax.judges.options import JudgeOptions
    from prb_jax.personal.features import FeatureStore
    from prb_jax.personal.model import PersonalisedModel
    from prb_jax.plugins import register_plugin
    from prb_jax.readouts.load_options import LoadOptions
    from prb_jax.remote.options import EndpointOptions
    from prb_jax.reports.comparison import compare
    from prb_jax.reports.correlation import correlate
    from prb_jax.reports.leaderboard import leaderboard
    from prb_jax.reports.page import report
    from prb_jax.reports.push import push
    from prb_jax.retrieval.rank_profiles import Ranked, rank_profiles
    from prb_jax.rl.ppo import PpoResult, ppo
    from prb_jax.rl.settings import PpoSettings
    from prb_jax.runs.parts import merge
    from prb_jax.scoring.evaluate import Evaluation, evaluate
    from prb_jax.scoring.load import load
    from prb_jax.scoring.prompt_extras import PromptExtras
    from prb_jax.scoring.reward_model import RewardModel
    from prb_jax.scoring.scorer import PlainScorer
    from prb_jax.serving.fields import Limits
    from prb_jax.serving.options import ServeOptions
    from prb_jax.serving.reward_fn import reward_fn
    from prb_jax.serving.serve import serve
    from prb_jax.sources.prepare import Prepared, prepare
    from prb_jax.sources.reading import read_comparisons
    from prb_jax.sources.split import Split, split
    from prb_jax.study.ask import Question, ask
    from prb_jax.study.feature_options import FeatureOptions
    from prb_jax.study.personalise import Study, personalise
    from prb_jax.study.posts import PostsSweep, evaluate_posts
    from prb_jax.study.write_features import write_features
    from prb_jax.text.view import ViewOptions
    from prb_jax.training.convert import convert
    from prb_jax.training.settings import TrainSettings
    from prb_jax.training.train import TrainResult, train

_HOMES = {
    "audit": "prb_jax.auditing.audit",
    "audit_export": "prb_jax.auditing.judgements",
    "audit_report": "prb_jax.auditing.report",
    "Build": "prb_jax.building.build",
    "build": "prb_jax.building.build",
    "BuildSettings": "prb_jax.building.settings",
    "Comparison": "prb_jax.data.comparison",
    "Message": "prb_jax.data.comparison",
    "Post": "prb_jax.data.comparison",
    "RubricAspect": "prb_jax.data.comparison",
    "CheckpointError": "prb_jax.errors",
    "DataError": "prb_jax.errors",
    "MeshError": "prb_jax.errors",
    "PrbError": "prb_jax.errors",
    "PrbWarning": "prb_jax.errors",
    "RunError": "prb_jax.errors",
    "plan_aspects": "prb_jax.judges.aspects",
    "BestOfN": "prb_jax.judges.best_of_n",
    "best_of_n": "prb_jax.judges.best_of_n",
    "Distilled": "prb_jax.judges.distil",
    "distil": "prb_jax.judges.distil",
    "EndpointOptions": "prb_jax.remote.options",
    "guide": "prb_jax.generation.guide",
    "judge": "prb_jax.judges.judge",
    "JudgeOptions": "prb_jax.judges.options",
    "load_policy": "prb_jax.generation.policy",
    "Policy": "prb_jax.generation.policy",
    "Sample": "prb_jax.generation.policy",
    "PolicyAccuracy": "prb_jax.generation.policy_accuracy",
    "policy_accuracy": "prb_jax.generation.policy_accuracy",
    "SampleRun": "prb_jax.generation.sample",
    "sample_data": "prb_jax.generation.sample",
    "SampleOptions": "prb_jax.generation.rules",
    "inspect": "prb_jax.inspection.inspect",
    "FeatureStore": "prb_jax.personal.features",
    "PersonalisedModel": "prb_jax.personal.model",
    "register_plugin": "prb_jax.plugins",
    "LoadOptions": "prb_jax.readouts.load_options",
    "compare": "prb_jax.reports.comparison",
    "correlate": "prb_jax.reports.correlation",
    "leaderboard": "prb_jax.reports.leaderboard",
    "report": "prb_jax.reports.page",
    "push": "prb_jax.reports.push",
    "Ranked": "prb_jax.retrieval.rank_profiles",
    "rank_profiles": "prb_jax.retrieval.rank_profiles",
    "PpoResult": "prb_jax.rl.ppo",
    "ppo": "prb_jax.rl.ppo",
    "PpoSettings": "prb_jax.rl.settings",
    "merge": "prb_jax.runs.parts",
    "Evaluation": "prb_jax.scoring.evaluate",
    "evaluate": "prb_jax.scoring.evaluate",
    "load": "prb_jax.scoring.load",
    "PostsSweep": "prb_jax.study.posts",
    "evaluate_posts": "prb_jax.study.posts",
    "PromptExtras": "prb_jax.scoring.prompt_extras",
    "RewardModel": "prb_jax.scoring.reward_model",
    "PlainScorer": "prb_jax.scoring.scorer",
    "Limits": "prb_jax.serving.fields",
    "reward_fn": "prb_jax.serving.reward_fn",
    "ServeOptions": "prb_jax.serving.options",
    "serve": "prb_jax.serving.serve",
    "Prepared": "prb_jax.sources.prepare",
    "prepare": "prb_jax.sources.prepare",
    "read_comparisons": "prb_jax.sources.reading",
    "Split": "prb_jax.sources.split",
    "split": "prb_jax.sources.split",
    "Question": "prb_jax.study.ask",
    "ask": "prb_jax.study.ask",
    "Study": "prb_jax.study.personalise",
    "personalise": "prb_jax.study.personalise",
    "FeatureOptions": "prb_jax.study.feature_options",
    "write_features": "prb_jax.study.write_features",
    "ViewOptions": "prb_jax.text.view",
    "convert": "prb_jax.training.convert",
    "TrainSettings": "prb_jax.training.settings",
    "TrainResult": "prb_jax.training.train",
    "train": "prb_jax.training.train",
}

__all__ = [
    "BestOfN",
    "Build",
    "BuildSettings",
    "CheckpointError",
    "Comparison",
    "DataError",
    "Distilled",
    "EndpointOptions",
    "Evaluation",
    "FeatureOptions",
    "FeatureStore",
    "JudgeOptions",
    "Limits",
    "LoadOptions",
    "MeshError",
    "Message",
    "PersonalisedModel",
    "PlainScorer",
    "Policy",
    "PolicyAccuracy",
    "Post",
    "PostsSweep",
    "PpoResult",
    "PpoSettings",
    "PrbError",
    "PrbWarning",
    "Prepared",
    "PromptExtras",
    "Question",
    "Ranked",
    "RewardModel",
    "RubricAspect",
    "RunError",
    "Sample",
    "SampleOptions",
    "SampleRun",
    "ServeOptions",
    "Split",
    "Study",
    "TrainResult",
    "TrainSettings",
    "ViewOptions",
    "__version__",
    "ask",
    "audit",
    "audit_export",
    "audit_report",
    "best_of_n",
    "build",
    "compare",
    "convert",
    "correlate",
    "distil",
    "evaluate",
    "evaluate_posts",
    "guide",
    "inspect",
    "judge",
    "leaderboard",
    "load",
    "load_policy",
    "merge",
    "personalise",
    "plan_aspects",
    "policy_accuracy",
    "ppo",
    "prepare",
    "push",
    "rank_profiles",
    "read_comparisons",
    "register_plugin",
    "report",
    "reward_fn",
    "sample_data",
    "serve",
    "split",
    "train",
    "write_features",
]


_RENAMED: dict[str, tuple[str, str]] = {}
"""Deprecated public names: the new name, and the version without the old one (the rule is in CONTRIBUTING.md)."""


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        new, version = _RENAMED[name]
        text = f"prb_jax.{name} is now prb_jax.{new}; the old name goes in version {version}"
        warnings.warn(text, FutureWarning, stacklevel=2)
        return getattr(sys.modules[__name__], new)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    if isinstance(value, FunctionType):
        from prb_jax.storage.urls import accepts_urls

        value = accepts_urls(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
