"""The sections of the options of `prb ppo`; `prb_jax.behaviour.rl.settings` combines them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from prb_jax.behaviour.judges.names import HALF, PAIRINGS, TIES
from prb_jax.behaviour.rl.numbers import Aggregation, EndRule, Estimator, Ratio
from prb_jax.models import Dtype, Together
from prb_jax.records.options import Options, option, same_option, section
from prb_jax.training.config import BatchSettings, CheckpointSettings, OptimizerSettings, Schedule

Algorithm = Literal["ppo", "grpo", "rloo", "reinforce++", "dpo", "sft"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
GROUPED: tuple[Algorithm, ...] = ("grpo", "rloo")
"""Algorithms that compare the responses of a prompt with each other."""
LABELLED: tuple[Algorithm, ...] = ("dpo", "sft")
"""Algorithms that learn from the labelled responses of the data, and draw nothing during training."""
DRAWING: tuple[Algorithm, ...] = ("ppo", "grpo", "rloo", "reinforce++")
"""Algorithms that learn from rollouts."""


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Options, prefix="rollout."):
    """The texts that the policy writes in every step."""

    n: int = option(4, "rollouts of each prompt; together they are one tree.", least=1)
    temperature: float = option(
        1.0,
        "divides the logits when texts are drawn and when their probabilities are computed.",
        above=0,
    )
    max_new_tokens: int = option(128, "maximum tokens of a rollout.", least=1)
    rows: int | None = option(
        None,
        "number of rollouts to draw at a time; None chooses by device. Affects speed, not results.",
        least=1,
    )
    keep_every: int | None = option(
        None,
        "save the first rollouts in `rollouts.jsonl` every this many steps; None for ten times in a run.",
        least=1,
        effect="none",
    )
    keep: int = option(2, "prompts to save from such a step, with all rollouts.", least=1, effect="none")


@dataclass(frozen=True, kw_only=True)
class ScoringJudgeSettings(Options, prefix="scoring.judge."):
    """Options for a judge as the reward (`judge:MODEL`, `rubric:MODEL` or `pairs:MODEL`)."""

    template: str | None = option(
        None,
        "file with the text that asks `judge:` for a number, with the places {prompt} and {answer}, or the user's turn "
        "of a generative reward model; None for the project's own text.",
        effect="contents",
    )
    system: str | None = option(
        None,
        "file with the text of a system turn before the template, or of a generative reward model; None for none.",
        effect="contents",
    )
    lowest: int | None = option(
        None,
        "lowest number of the scale of `judge:`; None for 1. `rubric:` always rates with 0, 1 and 2.",
    )
    highest: int | None = option(None, "highest number of this scale; None for 9.")
    pairing: str | None = option(
        None,
        "pairs of rollouts that `pairs:` compares: all pairs (None), each with the next one, or winners only.",
        choices=PAIRINGS,
    )
    ties: str = option(
        HALF,
        "value of a tie of `pairs:`: half a win for both, a loss for both, or missing.",
        choices=TIES,
    )
    min_mass: float | None = option(
        None,
        "least probability of A and B together for a verdict of `pairs:` that is read at its logits; None for 0.1.",
        least=0,
    )
    reason: bool = option(False, "whether the judge thinks in words before its number or verdict.")
    reason_tokens: int | None = option(
        None, "maximum tokens of a reply in words; None for 1,024 with reason, and else 16.", least=1
    )
    temperature: float = option(0.0, "temperature of replies in words; above 0 they are drawn.", least=0)
    votes: int = option(1, "replies in words to every question, at a temperature above 0.", least=1)
    chat_template_kwargs: str | None = option(
        None,
        'JSON of values for the judge\'s chat template, e.g. {"enable_thinking": true}; None for none.',
    )
    top_logprobs: int | None = option(
        None,
        "number of most probable tokens to request from an endpoint; the rating is their expected number. "
        "None for the number in its reply.",
        least=1,
    )
    concurrency: int = option(8, "requests to an endpoint at a time.", least=1, effect="none")

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.scale or (1, 9)
        self.check("highest", low < high, f"more than the lowest number, {low}")

    @property
    def scale(self) -> tuple[int, int] | None:
        """The scale of `judge:`; None for the judge's default."""
        if self.lowest is None and self.highest is None:
            return None
        return 1 if self.lowest is None else self.lowest, 9 if self.highest is None else self.highest


@dataclass(frozen=True, kw_only=True)
class ScoringSettings(Options, prefix="scoring."):
    """How the reward's score of a text becomes the training score."""

    scale: float = option(1.0, "multiplies the score before anything else (0.1 in the paper).")
    empty: float | None = option(
        None,
        "score, before scaling, of a rollout without a letter, which no reward model can read; None stops the run.",
    )
    failed: float | None = option(
        None,
        "score, before scaling, of the rollouts of a prompt whose reward cannot be computed or is not "
        "finite; None stops the run and names the prompt. The paper's callback gives 5, which is 0.5 after "
        "scaling; do not copy it.",
    )
    no_end: EndRule = option(
        "none",
        'rule for a rollout that was cut at max_new_tokens: "subtract" subtracts no_end_value (TRL), '
        '"replace" replaces the score by it (the "N+ implementation details", with -1).',
    )
    no_end_value: float | None = option(
        None,
        'value of this rule; None for 1 with "subtract" and -1 with "replace", so being cut never pays.',
    )
    free_tokens: int = option(0, "length up to which a rollout has no penalty.", least=0)
    token_penalty: float = option(0.0, "penalty for each token beyond that.")
    history: str | None = option(
        None,
        "labelled comparisons, named like `data`, from which a reward fitted by `prb personalise` learns "
        "the users; None for other rewards, and if users are known only by their profiles.",
        effect="contents",
    )
    profile_posts: int | None = option(
        None,
        "number of posts that the reward model sees; None for the number used in its training.",
    )
    protocol: str | None = option(
        None,
        'view of the reward model, "default" or "paper" (which cuts the end of long responses, like the '
        "paper's server); None for the view used in its training.",
    )
    max_length: int | None = option(
        None,
        "maximum tokens of a conversation for the reward model; None for the limit used in its training.",
    )
    dtype: Dtype | None = option(
        None,
        "type of the reward model; None for the type of its checkpoint.",
    )
    mesh: str | None = option(
        None,
        "mesh of the reward model; None for the policy's mesh.",
        effect="none",
    )
    tokenizer: str | None = option(
        None,
        "folder or hub id of a tokenizer whose chat template renders the conversation, for a reward behind `/classify` "
        "of SGLang, which expects token ids.",
        effect="none",
    )
    reference: str | None = option(
        None,
        "model from which `reward`, a policy, was trained by DPO: the score is the implicit reward, "
        "beta (log p_policy - log p_reference).",
        effect="contents",
    )
    beta: float = option(0.1, "factor of implicit rewards.", above=0)
    reference_free: bool = option(False, "implicit rewards without a reference: beta log p_policy.")
    logprobs: Together = option(
        "sum", "how token log-probabilities become one number with `scoring.reference_free`."
    )
    judge: ScoringJudgeSettings = section(ScoringJudgeSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        paid = self.no_end == "subtract" and self.no_end_value is not None and self.no_end_value < 0
        self.check("no_end_value", not paid, "at least 0, which scoring.no_end=subtract takes away")

    @property
    def value_of_no_end(self) -> float:
        """The value of the rule for rollouts that were cut."""
        if self.no_end_value is None:
            return -1.0 if self.no_end == "replace" else 1.0
        return self.no_end_value


@dataclass(frozen=True, kw_only=True)
class KlSettings(Options, prefix="kl."):
    """Regularisation of the policy towards the reference, its initial model."""

    place: Literal["reward", "loss"] | None = option(
        None,
        '"reward" subtracts coefficient * KL from the reward of each token; "loss" adds it to the loss. None '
        'is "loss" for grpo, which would divide the KL of rollouts of one score by its own deviation, and'
        ' otherwise "reward".',
    )
    estimator: Estimator | None = option(
        None,
        "k1, k2 or k3 (`prb_jax.behaviour.rl.numbers.kl_estimate`); None for k1 in the reward and k3 in the loss, "
        "where k1 is rejected: its expected gradient is 0.",
    )
    coefficient: float = option(0.05, "coefficient of the KL; 0 only measures it.", least=0)
    target: float | None = option(
        None,
        "target KL of a whole response; the coefficient adapts after every step. None keeps it fixed.",
        above=0,
    )
    horizon: float = option(
        10_000.0,
        "rollouts after which a constant error of a fifth has changed the coefficient by a fifth.",
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings(Options, prefix="advantage."):
    """How the advantage of a token is computed."""

    gamma: float = option(1.0, "discount of later rewards (ppo, reinforce++).", least=0, most=1)
    lam: float = option(
        0.95, "weight of longer returns in the generalised advantage estimate (ppo).", least=0, most=1
    )
    whiten: bool = option(
        True,
        "divides advantages by their standard deviation over the step and moves their mean to 0 (ppo; "
        "reinforce++ always does).",
    )
    whiten_rewards: bool = option(
        False, "divides rewards of tokens by their standard deviation and keeps their mean (ppo)."
    )
    scale_groups: bool = option(True, "divides by the standard deviation of the prompt's rollouts (grpo).")
    value_at_end: bool = option(
        False,
        "the state after the last token has a value and gets the score, as in TRL, which makes the mask of "
        "values one longer than the mask of tokens; otherwise the last token gets the score, and the episode "
        "ends (ppo).",
    )


@dataclass(frozen=True, kw_only=True)
class PolicyLossSettings(Options, prefix="loss."):
    """The training loss."""

    clip: float = option(0.2, "maximum distance of the ratio of new to old probability from 1.", above=0)
    ratio: Ratio = option(
        "token",
        "ratio of each token, or of the whole response (the geometric mean of its token ratios, as in GSPO).",
    )
    aggregation: Aggregation = option(
        "token-mean", "how token losses are combined: see `prb_jax.behaviour.rl.numbers.token_weights`."
    )
    entropy_coefficient: float = option(0.0, "weight of the entropy bonus.", least=0)
    value_coefficient: float = option(0.1, "weight of the value loss (ppo).", least=0)
    value_clip: float | None = option(
        0.2, "maximum distance of a value from the old one; None for no limit (ppo).", above=0
    )
    dpo_beta: float = option(0.1, "strength of the regularisation towards the reference (dpo).", above=0)
    label_smoothing: float = option(0.0, "probability that a label is wrong (dpo).", least=0, below=0.5)


@dataclass(frozen=True, kw_only=True)
class ValueSettings(Options, prefix="value."):
    """The value function (ppo). It starts at 0 everywhere."""

    trunk: Literal["own", "shared"] = option(
        "own",
        '"own": a second copy of the model (with LoRA a second adapter) and a head; "shared": a head on the'
        " states of the policy, whose gradient also trains the policy.",
    )
    learning_rate: float | None = option(None, "peak of its learning rate; None for the policy's.", least=0)


@dataclass(frozen=True, kw_only=True)
class RolloutBatchSettings(Options, prefix="batch."):
    """The batch of a step, and how often it is used."""

    prompts: int = option(16, "prompts of a step; pairs with dpo, preferred responses with sft.", least=1)
    minibatch: int | None = option(None, "prompts of one update; None for all prompts of the step.")
    epochs: int = option(1, "number of passes over the rollouts of a step.", least=1)
    tokens: int | None = same_option(BatchSettings, "tokens")
    max_buckets: int = option(4, "maximum number of batch shapes, and so of compilations.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        part = self.minibatch
        fits = part is None or (part >= 1 and self.prompts % part == 0)
        self.check("minibatch", fits, f"a divisor of batch.prompts={self.prompts}, or None")

    @property
    def updates(self) -> int:
        """Number of optimiser updates in a step."""
        return self.epochs * (self.prompts // (self.minibatch or self.prompts))


@dataclass(frozen=True, kw_only=True)
class UpdateSettings(OptimizerSettings, prefix="optimizer."):
    """AdamW, separate for policy and value function; epsilon is added to the root of the second moment (optax)."""

    learning_rate: float = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        3e-6, "peak learning rate of the policy; 0 changes nothing.", least=0
    )
    schedule: Schedule = same_option(OptimizerSettings, "schedule", default="constant")
    warmup_share: float = option(
        0.0, "share of the updates in which the learning rate rises from 0.", least=0, most=1
    )
    weight_decay: float = same_option(OptimizerSettings, "weight_decay", default=0.0)
    b2: float = same_option(OptimizerSettings, "b2", default=0.999)


@dataclass(frozen=True, kw_only=True)
class KeptSettings(Options, prefix="checkpoint."):
    """Saved states of the run."""

    every: int | None = same_option(
        CheckpointSettings,
        "every",
        meaning="steps between checkpoints; None for ten in a run. SIGTERM also saves one.",
    )
    keep_last: int = same_option(CheckpointSettings, "keep_last")


@dataclass(frozen=True, kw_only=True)
class WatchSettings(Options, prefix="watch."):
    """Distinguishes a better policy from one that exploits a weakness of its reward."""

    gold: str | None = option(
        None,
        "second reward, named like `reward`, that is measured and never trained on; None for none.",
        effect="contents",
    )
    data: str | None = option(
        None,
        "prompts that are not trained on, named like `data`: at the end the policy writes texts for them, "
        "which reward and gold score; None for none. dpo and sft, which draw no rollouts, are watched only"
        " this way.",
        effect="contents",
    )
    every: int = option(
        1,
        "steps between two measurements of gold.",
        least=1,
    )
    window: int | None = option(
        None,
        "number of measurements to average: the run stops if the mean of the last ones is below the mean of "
        "as many before them while the reward rose; None disables this rule.",
        least=1,
    )
    most_kl: float | None = option(
        None,
        "the run stops when the KL of a rollout exceeds this; None disables this rule.",
        above=0,
    )
