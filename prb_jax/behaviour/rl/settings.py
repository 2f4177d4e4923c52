"""Every option of `prb ppo`: its name, type, default and meaning.

A config is a Python file whose `get_config()` changes :func:`default_config`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from prb_jax.behaviour.rl.numbers import Estimator
from prb_jax.behaviour.rl.sections import (
    ALGORITHMS,
    DRAWING,
    GROUPED,
    LABELLED,
    AdvantageSettings,
    Algorithm,
    KeptSettings,
    KlSettings,
    PolicyLossSettings,
    RolloutBatchSettings,
    RolloutSettings,
    ScoringSettings,
    UpdateSettings,
    ValueSettings,
    WatchSettings,
)
from prb_jax.errors import DataError, RunError, quote
from prb_jax.models import AttentionName, Dtype, Remat
from prb_jax.models.lora_config import LoraConfig
from prb_jax.records.config_files import build_settings, to_config_dict
from prb_jax.records.options import check_given, flat_settings, option, same_option, section
from prb_jax.training.config import EVENTS, LogSettings, RunOptions, TrainSettings

if TYPE_CHECKING:
    from ml_collections import ConfigDict

_USED_BY: dict[str, tuple[Algorithm, ...]] = {
    "rollout": DRAWING, "scoring": DRAWING, "kl": DRAWING, "loss": DRAWING,
    "watch.every": DRAWING, "watch.window": DRAWING, "watch.most_kl": DRAWING,
    "advantage": ("ppo",), "value": ("ppo",), "loss.value_coefficient": ("ppo",), "loss.value_clip": ("ppo",),
    "advantage.gamma": ("ppo", "reinforce++"), "advantage.scale_groups": ("grpo",),
    "loss.dpo_beta": ("dpo",), "loss.label_smoothing": ("dpo",),
}  # fmt: skip
"""The algorithms that use a section, or one option of it; every algorithm uses the others."""

_IN_STEPS = (
    "rollout.keep_every", "rollout.keep", "scoring.no_end", "scoring.no_end_value", "scoring.free_tokens",
    "scoring.token_penalty",
)  # fmt: skip
"""Options of rollouts and their scores that the texts for `watch.data` do not use."""


@dataclass(frozen=True, kw_only=True)
class PpoSettings(RunOptions):
    """One run of `prb ppo`."""

    model: str | None = option(
        None,
        "Hugging Face folder or hub id of the causal language model that becomes the policy.",
        "PATH",
        effect="contents",
        required="a folder or hub id of a causal language model",
    )
    data: str | None = option(
        None,
        "prompts (pairs for dpo), in any form that `prb evaluate --data` accepts; separate several with commas. "
        "Only dpo and sft use labels and responses.",
        "FILE",
        effect="contents",
        required="a file, folder or data set",
    )
    subset: str | None = same_option(TrainSettings, "subset")
    limit: int | None = same_option(TrainSettings, "limit")
    reward: str | None = option(
        None,
        "scorer of a rollout: a reward model or a baseline as for `prb evaluate`, the URL of `prb serve` or of "
        "`/classify` of vLLM or SGLang, a judge as judge:MODEL or rubric:MODEL (MODEL may be URL#NAME, a model at an"
        " endpoint), or a function as FILE.py:NAME, which maps a comparison of K rollouts to K numbers."
        " dpo and sft accept it only with watch.data.",
        "MODEL",
        effect="contents",
        required="a reward model, a baseline or FILE.py:NAME",
    )
    algorithm: Algorithm = option(
        "ppo",
        "how scores become advantages: with a value function, the rollouts of a prompt, or the step; dpo "
        "learns from the pairs of the data and sft from their preferred responses, and both draw nothing.",
    )
    steps: int = option(100, "rounds of rollouts and their updates.", least=1)
    epochs: float | None = option(
        None,
        "passes over the data, instead of `steps`; the next pass fills up the last step. None for `steps`.",
        above=0,
        effect="none",
    )
    seed: int = option(0, "seed for rollouts, order of the data and new weights.", least=0)
    dtype: Dtype = option(
        "float32",
        "type of activations and frozen matrices; trained weights, log-probabilities, values and losses are"
        " float32.",
    )
    mesh: str | None = same_option(TrainSettings, "mesh")
    tuning: Literal["full", "lora"] = option(
        "lora",
        "trained part: everything, or low-rank updates; the reference is then the model without them.",
    )
    profile_posts: int = option(10, "maximum number of profile posts in the prompt.", least=0)
    max_length: int | None = option(
        None, "maximum tokens of prompt and rollout together; None for the model's own limit.", least=1
    )
    revision: str | None = same_option(TrainSettings, "revision")
    base: str | None = same_option(TrainSettings, "base")
    tokenizer: str | None = same_option(TrainSettings, "tokenizer")
    chat_template: str | None = same_option(TrainSettings, "chat_template")
    remat: Remat = same_option(TrainSettings, "remat")
    attention: AttentionName = same_option(TrainSettings, "attention")
    export_dtype: Dtype | None = option(None, "type of the weights in `OUT/model`; None for `dtype`.")
    rollout: RolloutSettings = section(RolloutSettings)
    scoring: ScoringSettings = section(ScoringSettings)
    kl: KlSettings = section(KlSettings)
    advantage: AdvantageSettings = section(AdvantageSettings)
    loss: PolicyLossSettings = section(PolicyLossSettings)
    value: ValueSettings = section(ValueSettings)
    optimizer: UpdateSettings = section(UpdateSettings)
    lora: LoraConfig = section(LoraConfig)
    batch: RolloutBatchSettings = section(RolloutBatchSettings)
    checkpoint: KeptSettings = section(KeptSettings)
    watch: WatchSettings = section(WatchSettings)
    log: LogSettings = section(LogSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm in GROUPED and self.rollout.n < 2:
            raise DataError(
                f"rollout.n: expected at least 2 with algorithm={self.algorithm}, which compares the rollouts of a "
                f"prompt, found {self.rollout.n}"
            )
        if self.kl_estimator == "k1" and not self.kl_in_reward:
            raise DataError(
                "kl.estimator: expected k2 or k3 with kl.place=loss, found k1, whose expected gradient is 0"
            )
        scaled = self.algorithm == "grpo" and self.advantage.scale_groups
        if scaled and self.kl_in_reward and self.kl.coefficient:
            raise DataError(
                "kl.place: expected loss with algorithm=grpo and advantage.scale_groups=true, found reward: the KL "
                "would be divided by the deviation of the prompt's rollouts, so that rollouts of one score were "
                "trained on the noise of their KL, whatever its coefficient"
            )

    @property
    def with_values(self) -> bool:
        """Whether there is a value function."""
        return self.algorithm == "ppo"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is part of the reward; else it is part of the loss."""
        return (self.kl.place or ("loss" if self.algorithm == "grpo" else "reward")) == "reward"

    @property
    def reads_while_updating(self) -> bool:
        """Whether the only update of a step also reads the log-probabilities of its rollouts: nothing needs them
        earlier, and the weights are still those that drew them."""
        return not (self.with_values or self.kl_in_reward) and self.batch.updates == 1

    @property
    def kl_estimator(self) -> Estimator:
        """The chosen estimator, or the default for the place of the KL."""
        return self.kl.estimator or ("k1" if self.kl_in_reward else "k3")

    def with_steps(self, comparisons: int) -> PpoSettings:
        """Return the settings with `epochs` over this many comparisons converted to `steps`."""
        if self.epochs is None:
            return self
        steps = max(1, math.ceil(self.epochs * comparisons / self.batch.prompts))
        return replace(self, steps=steps, epochs=None)

    @property
    def exported_dtype(self) -> str:
        return self.export_dtype or self.dtype

    @property
    def rollouts_every(self) -> int:
        """Steps between two that save rollouts."""
        return self.rollout.keep_every or max(1, self.steps // EVENTS)


def default_config() -> ConfigDict:
    """Return every option with its default. Keys cannot be added, and values keep their types."""
    return to_config_dict(PpoSettings())


def used_by(key: str) -> tuple[Algorithm, ...]:
    """Return the algorithms that use an option."""
    return _USED_BY.get(key) or _USED_BY.get(key.partition(".")[0]) or ALGORITHMS


def check_used(settings: PpoSettings, *, given: Sequence[str] = ()) -> None:
    """Reject options without effect: each of them must have its default.

    Args:
      settings: Settings of a run.
      given: Keys whose values the caller passes separately.

    Raises:
      DataError: the algorithm does not use an option (names those that do), or an option needs another one.
    """
    gold = settings.watch.gold is not None or "watch.gold" in given
    of_gold = "" if gold else "watch.gold, the second reward that it looks at"
    lacking = {  # by key or section: missing requirement
        "lora": "" if settings.tuning == "lora" else "tuning=lora",
        "scoring.no_end_value": "" if settings.scoring.no_end != "none" else "scoring.no_end",
        "scoring.free_tokens": "" if settings.scoring.token_penalty else "scoring.token_penalty",
        "kl.target": "" if settings.kl.coefficient else "a kl.coefficient above 0, which it multiplies",
        "kl.horizon": "" if settings.kl.target is not None else "kl.target",
        **dict.fromkeys(("watch.data", "watch.every", "watch.window"), of_gold),
    }
    unset = flat_settings(PpoSettings())
    for key, value in flat_settings(settings).items():
        if value == unset[key]:
            continue
        section, users = key.partition(".")[0], used_by(key)
        of_texts = section in ("rollout", "scoring") and key not in _IN_STEPS
        if settings.algorithm not in users and not (of_texts and settings.watch.data is not None):
            raise DataError(
                f"{key}: expected its default {quote(unset[key])} with algorithm={settings.algorithm}, "
                f"which does not use it ({', '.join(users)} {'do' if len(users) > 1 else 'does'}), found "
                f"{quote(value)}"
            )
        if needed := lacking.get(key) or lacking.get(section):
            raise DataError(
                f"{key}: needs {needed}: without it expected nothing but the default {quote(unset[key])}, found "
                f"{quote(value)}"
            )


def load_ppo_settings(
    config: Any, overrides: Sequence[str] = (), *, complete: bool = True, given: Sequence[str] = ()
) -> PpoSettings:
    """Return the checked settings of a config with overrides applied.

    Args:
      config, overrides: Same as for :func:`prb_jax.records.config_files.build_settings`, or settings.
      complete: Whether a model, data and a reward are required.
      given: Keys whose values the caller passes, so the settings may omit them: "data", "reward", "watch.gold".

    Raises:
      RunError, DataError: an unknown key (naming the nearest one), a wrong type, or a value out of range.
    """
    settings = build_settings(PpoSettings, config, overrides)
    overridden = {override.partition("=")[0] for override in overrides}
    if settings.epochs is not None and "epochs" in overridden and "steps" not in overridden:
        settings = replace(settings, steps=PpoSettings.steps)  # epochs replaces the config's steps
    labelled = settings.algorithm in LABELLED
    check_used(settings, given=given)
    if complete:
        check_given(settings, but=[*given, *(["reward"] if labelled else [])])
    if settings.epochs is not None and settings.steps != PpoSettings.steps:
        raise RunError(
            f"config key 'steps': epochs={settings.epochs:g} says how long the run is: leave it out, or epochs=none"
        )
    if labelled and settings.watch.data is None:
        what = "labelled pairs" if settings.algorithm == "dpo" else "preferred responses"
        if settings.reward or "reward" in given:
            raise RunError(
                f"config key 'reward': {settings.algorithm} learns from {what} and asks no reward: leave it out; with "
                "watch.data=FILE it names the reward model whose choices the data are, and scores the texts for FILE"
            )
        if settings.watch.gold or "watch.gold" in given:
            raise RunError(
                f"config key 'watch.gold': {settings.algorithm} learns from {what} and draws no rollouts: expected "
                "watch.data=FILE, prompts for which it writes texts at its end, or no watch.gold"
            )
    return settings
