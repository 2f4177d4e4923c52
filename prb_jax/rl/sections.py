"""The sections of the options of `prb ppo`; `prb_jax.rl.settings` has the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from prb_jax.errors import DataError, quote
from prb_jax.models import Dtype
from prb_jax.training.config import choices_of
from prb_jax.training.settings import OptimizerSettings

_DEFAULT_EPS = 1e-8


def check_value(section: Any, prefix: str, name: str, ok: bool, expected: str) -> None:
    """Raise DataError where a value is out of its range; names the key, prefix first."""
    if not ok:
        raise DataError(f"{prefix}{name}: expected {expected}, found {quote(getattr(section, name))}")


def check_choices(section: Any, prefix: str) -> None:
    """Settings made in Python are checked here; a config's values are, with their keys, when it is read."""
    for name, hint in get_type_hints(type(section)).items():
        choices, value = choices_of(hint), getattr(section, name)
        if choices and not (value is None and type(None) in get_args(hint)):
            check_value(section, prefix, name, value in choices, f"one of {', '.join(choices)}")


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """The texts that the policy writes in every step.

    Attributes:
      n: rollouts of each prompt; together they are one tree.
      temperature: divides the logits, when texts are drawn and wherever their probabilities are computed.
      max_new_tokens: most tokens of a rollout.
      rows: rollouts that are drawn at a time; None chooses by device. It decides speed, not results.
      keep_every: steps between those whose first rollouts are kept in `rollouts.jsonl`; None for ten in a run.
      keep: prompts of such a step that are kept, with all their rollouts.
    """

    n: int = 4
    temperature: float = 1.0
    max_new_tokens: int = 128
    rows: int | None = None
    keep_every: int | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        for name in ("n", "max_new_tokens", "keep"):
            check_value(self, "rollout.", name, getattr(self, name) >= 1, "at least 1")
        for name in ("rows", "keep_every"):
            value = getattr(self, name)
            check_value(self, "rollout.", name, value is None or value >= 1, "at least 1, or None")
        check_value(self, "rollout.", "temperature", self.temperature > 0, "more than 0")


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """How a reward is asked that is a judge (`judge:MODEL` or `rubric:MODEL`).

    Attributes:
      template: file with the text that asks `judge:` for a number, with the places {prompt} and {answer}; None for the
        project's own one.
      system: file with the text of a system turn before it (`judge:`); None for none.
      lowest: number of the scale of `judge:`; None for 1. `rubric:` always rates with 0, 1 and 2.
      highest: number of that scale; None for 9.
      reason: whether the judge thinks in words before it names its number.
      top_logprobs: most probable tokens that an endpoint is asked for, of which the expected number is taken; None for
        the number in its reply.
      concurrency: requests to an endpoint at a time.
    """

    template: str | None = None
    system: str | None = None
    lowest: int | None = None
    highest: int | None = None
    reason: bool = False
    top_logprobs: int | None = None
    concurrency: int = 8

    def __post_init__(self) -> None:
        low, high = self.scale or (1, 9)
        check_value(self, "scoring.judge.", "highest", low < high, f"more than the lowest number, {low}")
        check_value(self, "scoring.judge.", "concurrency", self.concurrency >= 1, "at least 1")
        most = self.top_logprobs
        check_value(self, "scoring.judge.", "top_logprobs", most is None or most >= 1, "at least 1, or None")

    @property
    def scale(self) -> tuple[int, int] | None:
        """The scale of `judge:`; None where it is the judge's own one."""
        if self.lowest is None and self.highest is None:
            return None
        return (
            1 if self.lowest is None else self.lowest,
            9 if self.highest is None else self.highest,
        )


@dataclass(frozen=True, kw_only=True)
class ScoringSettings:
    """From the reward's score of a text to the score that is trained on.

    Attributes:
      scale: multiplies the score, first of all (0.1 in the paper).
      empty: score, before scaling, of a rollout without a letter, which no reward model can read; None stops the run.
      failed: score, before scaling, of the rollouts of a prompt whose reward cannot be computed or is not finite; None
        stops the run and names the prompt. The paper's callback gives 5, which is 0.5 after scaling; do not copy it.
      no_end: rule for a rollout that was cut at max_new_tokens: "subtract" takes no_end_value away (TRL), "replace"
        puts it in place of the score (the "N+ implementation details", with -1).
      no_end_value: of that rule; None for 1 with "subtract" and -1 with "replace", so that it never pays to be cut.
      free_tokens: length up to which a rollout has no penalty.
      token_penalty: taken away for each token beyond that.
      history: labelled comparisons, as `data`, from which a reward that was fitted by `prb personalise` learns the
        users; None for other rewards, and where profiles are all that is known of users.
      profile_posts: posts that the reward model is shown; None as it was trained.
      protocol: of the reward model's text, "default" or "paper" (which cuts the end of long responses, as the paper's
        server does); None as it was trained.
      max_length: most tokens of a conversation for the reward model; None as it was trained.
      dtype: of the reward model; None for that of its checkpoint.
      mesh: of the reward model; None for that of the policy.
      judge: how a judge is asked.
    """

    scale: float = 1.0
    empty: float | None = None
    failed: float | None = None
    no_end: Literal["none", "subtract", "replace"] = "none"
    no_end_value: float | None = None
    free_tokens: int = 0
    token_penalty: float = 0.0
    history: str | None = None
    profile_posts: int | None = None
    protocol: str | None = None
    max_length: int | None = None
    dtype: Dtype | None = None
    mesh: str | None = None
    judge: JudgeSettings = field(default_factory=JudgeSettings)

    def __post_init__(self) -> None:
        check_choices(self, "scoring.")
        check_value(self, "scoring.", "free_tokens", self.free_tokens >= 0, "at least 0")
        paid = self.no_end == "subtract" and self.no_end_value is not None and self.no_end_value < 0
        check_value(
            self, "scoring.", "no_end_value", not paid, "at least 0, which scoring.no_end=subtract takes away"
        )

    @property
    def value_of_no_end(self) -> float:
        """The number of the rule for rollouts that were cut."""
        if self.no_end_value is None:
            return -1.0 if self.no_end == "replace" else 1.0
        return self.no_end_value


@dataclass(frozen=True, kw_only=True)
class KlSettings:
    """What holds the policy to the reference, the model that it started as.

    Attributes:
      place: "reward" takes coefficient * KL from the reward of each token; "loss" adds it to the loss. None for "loss"
        with grpo, which would divide the KL of rollouts of one score by its own deviation, and else "reward".
      estimator: k1, k2 or k3 (`prb_jax.rl.numbers.kl_estimate`); None for k1 in the reward and k3 in the loss, where k1
        is refused: its expected gradient is 0.
      coefficient: of the KL; 0 measures it and does nothing.
      target: KL of a whole response to which the coefficient is adapted, after every step; None keeps it fixed.
      horizon: rollouts after which a constant error of a fifth has changed the coefficient by a fifth.
    """

    place: Literal["reward", "loss"] | None = None
    estimator: Literal["k1", "k2", "k3"] | None = None
    coefficient: float = 0.05
    target: float | None = None
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        check_choices(self, "kl.")
        check_value(self, "kl.", "coefficient", self.coefficient >= 0, "at least 0")
        check_value(self, "kl.", "target", self.target is None or self.target > 0, "more than 0, or None")
        check_value(self, "kl.", "horizon", self.horizon > 0, "more than 0")


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """How much better than expected a token was.

    Attributes:
      gamma: discount of later rewards (ppo, reinforce++).
      lam: weight of longer returns in the generalised advantage estimate (ppo).
      whiten: divides advantages by their standard deviation over the step and moves their mean to 0 (ppo; reinforce++
        always does).
      whiten_rewards: divides rewards of tokens by their standard deviation and keeps their mean (ppo).
      scale_groups: divides by the standard deviation of the prompt's rollouts (grpo).
      value_at_end: the state after the last token has a value of its own and gets the score, as in TRL, so that the
        mask of values is one longer than that of tokens; otherwise the last token gets the score, and nothing follows
        (ppo).
    """

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    whiten_rewards: bool = False
    scale_groups: bool = True
    value_at_end: bool = False

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            check_value(self, "advantage.", name, 0 <= getattr(self, name) <= 1, "0 to 1")


@dataclass(frozen=True, kw_only=True)
class PolicyLossSettings:
    """What is minimised.

    Attributes:
      clip: how far the ratio of new to old probability may leave 1.
      ratio: of each token, or of the whole response (the geometric mean of its tokens' ratios, as in GSPO).
      aggregation: how the losses of tokens become one: see `prb_jax.rl.numbers.token_weights`.
      entropy_coefficient: of the entropy, which is added to what is maximised.
      value_coefficient: of the value loss (ppo).
      value_clip: how far a value may leave the old one; None for no limit (ppo).
      dpo_beta: how strongly the policy is held to the reference (dpo).
      label_smoothing: probability that a label is wrong (dpo).
    """

    clip: float = 0.2
    ratio: Literal["token", "sequence"] = "token"
    aggregation: Literal[
        "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm"
    ] = "token-mean"
    entropy_coefficient: float = 0.0
    value_coefficient: float = 0.1
    value_clip: float | None = 0.2
    dpo_beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_choices(self, "loss.")
        check_value(self, "loss.", "clip", self.clip > 0, "more than 0")
        check_value(
            self,
            "loss.",
            "value_clip",
            self.value_clip is None or self.value_clip > 0,
            "more than 0, or None",
        )
        for name in ("entropy_coefficient", "value_coefficient"):
            check_value(self, "loss.", name, getattr(self, name) >= 0, "at least 0")
        check_value(self, "loss.", "dpo_beta", self.dpo_beta > 0, "more than 0")
        check_value(
            self, "loss.", "label_smoothing", 0 <= self.label_smoothing < 0.5, "at least 0 and less than 0.5"
        )


@dataclass(frozen=True, kw_only=True)
class ValueSettings:
    """The value function (ppo). It starts at 0 everywhere.

    Attributes:
      trunk: "own": a second copy of the model (with LoRA a second adapter) and a head; "shared": a head on the states
        of the policy, whose gradient goes into the policy too.
      learning_rate: peak of its rate; None for that of the policy.
    """

    trunk: Literal["own", "shared"] = "own"
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        check_choices(self, "value.")
        rate = self.learning_rate
        check_value(self, "value.", "learning_rate", rate is None or rate >= 0, "at least 0, or None")


@dataclass(frozen=True, kw_only=True)
class RolloutBatchSettings:
    """What a step sees, and how often.

    Attributes:
      prompts: prompts of a step; of pairs with dpo, of preferred responses with sft.
      minibatch: prompts of one update; None for all of the step.
      epochs: how many times a step goes through its rollouts.
      tokens: most padded tokens of a microbatch, for each part into which the mesh splits a batch; None chooses by
        device. It decides memory and speed, not results.
      max_buckets: the most shapes of batches, and so compiles.
    """

    prompts: int = 16
    minibatch: int | None = None
    epochs: int = 1
    tokens: int | None = None
    max_buckets: int = 4

    def __post_init__(self) -> None:
        for name in ("prompts", "epochs", "max_buckets"):
            check_value(self, "batch.", name, getattr(self, name) >= 1, "at least 1")
        check_value(self, "batch.", "tokens", self.tokens is None or self.tokens >= 1, "at least 1, or None")
        part = self.minibatch
        fits = part is None or (part >= 1 and self.prompts % part == 0)
        check_value(self, "batch.", "minibatch", fits, f"a divisor of batch.prompts={self.prompts}, or None")

    @property
    def updates(self) -> int:
        """Updates of the optimiser in a step."""
        return self.epochs * (self.prompts // (self.minibatch or self.prompts))


@dataclass(frozen=True, kw_only=True)
class UpdateSettings(OptimizerSettings):
    """AdamW, of policy and value function each; epsilon is added to the root of the second moment (optax).

    Attributes:
      learning_rate: the rate of the policy at its peak; 0 changes nothing.
      schedule: course of the learning rate after the warm-up; "wsd" is constant and then falls at the end.
      warmup_share: share of the updates in which the learning rate rises from 0.
      decay_share: share of the updates in which it falls ("wsd").
      final_share: share of the peak that is left at the end.
      weight_decay: decay of matrices; norms and biases have none.
      b1: decay of Adam's first moment.
      b2: decay of Adam's second moment.
      eps: added to the root of Adam's second moment.
      clip_norm: largest global norm of the gradient; None for no clipping.
    """

    learning_rate: float = 3e-6  # pyright: ignore[reportIncompatibleVariableOverride]
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_share: float = 0.0
    weight_decay: float = 0.0
    b2: float = 0.999
    eps: float = _DEFAULT_EPS

    def __post_init__(self) -> None:
        check_value(self, "optimizer.", "learning_rate", self.learning_rate >= 0, "at least 0")
        rest: dict[str, Any] = {**vars(self), "learning_rate": self.learning_rate or None}
        OptimizerSettings(**rest)


@dataclass(frozen=True, kw_only=True)
class KeptSettings:
    """Saved states of the run.

    Attributes:
      every: steps between checkpoints; None for ten in a run. SIGTERM saves one too.
      keep_last: number of the newest checkpoints that are kept.
    """

    every: int | None = None
    keep_last: int = 2

    def __post_init__(self) -> None:
        check_value(
            self, "checkpoint.", "every", self.every is None or self.every >= 1, "at least 1, or None"
        )
        check_value(self, "checkpoint.", "keep_last", self.keep_last >= 1, "at least 1")


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """What tells a better policy from one that has found a weakness of its reward.

    Attributes:
      gold: a second reward, named as `reward`, that is measured and never trained on; None for none.
      data: prompts that are not trained on, named as `data`: at the end the policy writes texts for them, which
        reward and gold score; None for none. dpo and sft, which draw no rollouts, are watched by it alone.
      every: steps between two measurements of gold.
      window: measurements that are averaged: the run stops where the mean of the last ones is below that of as many
        before them, while the reward rose; None never stops so.
      most_kl: the run stops where the KL of a rollout has exceeded this; None never stops so.
    """

    gold: str | None = None
    data: str | None = None
    every: int = 1
    window: int | None = None
    most_kl: float | None = None

    def __post_init__(self) -> None:
        check_value(self, "watch.", "every", self.every >= 1, "at least 1")
        check_value(self, "watch.", "window", self.window is None or self.window >= 1, "at least 1, or None")
        check_value(
            self, "watch.", "most_kl", self.most_kl is None or self.most_kl > 0, "more than 0, or None"
        )
