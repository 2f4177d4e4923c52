"""Evaluate and train reward models for individual people, on JAX.

    import prb_jax as prb
    rm = prb.load("path-or-hub-id")
    scores = rm.score([prb.Comparison(id="1", question="Hello?", responses=["Hi.", "Go away."])])

The public names below are imported on first use: ``import prb_jax`` (and ``prb --help``) starts neither JAX nor a
tokenizer library.
"""

import logging
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

from prb_jax.version import __version__

# transformers warns if PyTorch is missing; this package uses it only for tokenizers and configurations.
logging.getLogger("transformers").addFilter(
    lambda record: not record.getMessage().startswith("PyTorch was not found")
)

if TYPE_CHECKING:
    from prb_jax.behaviour.generation.guide import guide
    from prb_jax.behaviour.generation.policy import Policy, Sample, load_policy
    from prb_jax.behaviour.generation.policy_accuracy import PolicyAccuracy, policy_accuracy
    from prb_jax.behaviour.generation.rules import SampleOptions
    from prb_jax.behaviour.generation.sample import SampleRun, sample_data
    from prb_jax.behaviour.judges.aspects import plan_aspects
    from prb_jax.behaviour.judges.best_of_n import BestOfN, best_of_n
    from prb_jax.behaviour.judges.distil import Distilled, distil
    from prb_jax.behaviour.judges.judge import judge
    from prb_jax.behaviour.judges.options import JudgeOptions
    from prb_jax.behaviour.rl.ppo import PpoResult, ppo
    from prb_jax.behaviour.rl.settings import PpoSettings
    from prb_jax.building.auditing.audit import audit
    from prb_jax.building.auditing.judgements import audit_export
    from prb_jax.building.auditing.report import audit_report
    from prb_jax.building.build import Build, build
    from prb_jax.building.settings import BuildSettings
    from prb_jax.errors import CheckpointError, DataError, MeshError, PrbError, PrbWarning, RunError
    from prb_jax.models.readouts.load_options import LoadOptions
    from prb_jax.personal.feature_options import FeatureOptions
    from prb_jax.personal.features import FeatureStore
    from prb_jax.plugins import register_plugin
    from prb_jax.records.comparison import Comparison, Message, Post, RubricAspect
    from prb_jax.records.intake import read_comparisons
    from prb_jax.records.sources.prepare import Prepared, prepare
    from prb_jax.records.sources.split import Split, split
    from prb_jax.reports.comparison import compare
    from prb_jax.reports.correlation import correlate
    from prb_jax.reports.inspection.inspect import inspect
    from prb_jax.reports.leaderboard import leaderboard
    from prb_jax.reports.push import push
    from prb_jax.reports.report import report
    from prb_jax.runs.merging import merge
    from prb_jax.scoring.evaluate import Evaluation, evaluate
    from prb_jax.scoring.load import load
    from prb_jax.scoring.personalised import PersonalisedModel
    from prb_jax.scoring.plain import PlainScorer
    from prb_jax.scoring.prompt_extras import PromptExtras
    from prb_jax.scoring.remote.options import EndpointOptions
    from prb_jax.scoring.reward_model import RewardModel
    from prb_jax.scoring.scorer import Scorer
    from prb_jax.serving.options import Limits, ServeOptions
    from prb_jax.serving.reward_fn import reward_fn
    from prb_jax.serving.serve import serve
    from prb_jax.study.ask import Question, ask
    from prb_jax.study.personalise import Study, personalise
    from prb_jax.study.posts import PostsSweep, evaluate_posts
    from prb_jax.study.retrieval.rank_profiles import Ranked, rank_profiles
    from prb_jax.study.write_features import write_features
    from prb_jax.text.trl_rows import trl_rows
    from prb_jax.text.view import ViewOptions
    from prb_jax.training.config import TrainSettings
    from prb_jax.training.convert import convert
    from prb_jax.training.train import TrainResult, train

_HOMES = {
    name: f"prb_jax.{module}"
    for module, names in {
        "building.auditing.audit": "audit",
        "building.auditing.judgements": "audit_export",
        "building.auditing.report": "audit_report",
        "building.build": "Build build",
        "building.settings": "BuildSettings",
        "records.comparison": "Comparison Message Post RubricAspect",
        "errors": "CheckpointError DataError MeshError PrbError PrbWarning RunError",
        "behaviour.generation.guide": "guide",
        "behaviour.generation.policy": "Policy Sample load_policy",
        "behaviour.generation.policy_accuracy": "PolicyAccuracy policy_accuracy",
        "behaviour.generation.rules": "SampleOptions",
        "behaviour.generation.sample": "SampleRun sample_data",
        "reports.inspection.inspect": "inspect",
        "behaviour.judges.aspects": "plan_aspects",
        "behaviour.judges.best_of_n": "BestOfN best_of_n",
        "behaviour.judges.distil": "Distilled distil",
        "behaviour.judges.judge": "judge",
        "behaviour.judges.options": "JudgeOptions",
        "personal.feature_options": "FeatureOptions",
        "personal.features": "FeatureStore",
        "scoring.personalised": "PersonalisedModel",
        "plugins": "register_plugin",
        "models.readouts.load_options": "LoadOptions",
        "scoring.remote.options": "EndpointOptions",
        "reports.comparison": "compare",
        "reports.correlation": "correlate",
        "reports.leaderboard": "leaderboard",
        "reports.report": "report",
        "reports.push": "push",
        "study.retrieval.rank_profiles": "Ranked rank_profiles",
        "behaviour.rl.ppo": "PpoResult ppo",
        "behaviour.rl.settings": "PpoSettings",
        "runs.merging": "merge",
        "scoring.evaluate": "Evaluation evaluate",
        "scoring.load": "load",
        "scoring.prompt_extras": "PromptExtras",
        "scoring.reward_model": "RewardModel",
        "scoring.scorer": "Scorer",
        "scoring.plain": "PlainScorer",
        "serving.options": "Limits ServeOptions",
        "serving.reward_fn": "reward_fn",
        "serving.serve": "serve",
        "records.sources.prepare": "Prepared prepare",
        "records.intake": "read_comparisons",
        "records.sources.split": "Split split",
        "study.ask": "Question ask",
        "study.personalise": "Study personalise",
        "study.posts": "PostsSweep evaluate_posts",
        "study.write_features": "write_features",
        "text.trl_rows": "trl_rows",
        "text.view": "ViewOptions",
        "training.convert": "convert",
        "training.config": "TrainSettings",
        "training.train": "TrainResult train",
    }.items()
    for name in names.split()
}
"""The module of each public name."""

__all__ = [
    "BestOfN", "Build", "BuildSettings", "CheckpointError", "Comparison", "DataError", "Distilled",
    "EndpointOptions", "Evaluation", "FeatureOptions", "FeatureStore", "JudgeOptions", "Limits",
    "LoadOptions", "MeshError", "Message", "PersonalisedModel", "PlainScorer", "Policy", "PolicyAccuracy",
    "Post", "PostsSweep", "PpoResult", "PpoSettings", "PrbError", "PrbWarning", "Prepared", "PromptExtras",
    "Question", "Ranked", "RewardModel", "RubricAspect", "RunError", "Sample", "SampleOptions", "SampleRun", "Scorer",
    "ServeOptions", "Split", "Study", "TrainResult", "TrainSettings", "ViewOptions", "__version__", "ask",
    "audit", "audit_export", "audit_report", "best_of_n", "build", "compare", "convert", "correlate",
    "distil", "evaluate", "evaluate_posts", "guide", "inspect", "judge", "leaderboard", "load", "load_policy",
    "merge", "personalise", "plan_aspects", "policy_accuracy", "ppo", "prepare", "push", "rank_profiles",
    "read_comparisons", "register_plugin", "report", "reward_fn", "sample_data", "serve", "split", "train",
    "trl_rows", "write_features",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        from difflib import get_close_matches

        near = get_close_matches(name, __all__, n=1)
        hint = f"; did you mean {near[0]!r}?" if near and not name.startswith("_") else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = getattr(import_module(home), name)
    if isinstance(value, FunctionType):
        from prb_jax.seams import get

        value = get("storage", "accepts_urls").value(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
