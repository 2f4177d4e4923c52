"""The sections of the options of `prb ppo`; `prb_jax.behaviour.rl.settings` has the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from prb_jax.behaviour.judges.options import HALF, PAIRINGS, TIES
from prb_jax.behaviour.rl.numbers import Aggregation, EndRule, Estimator, Ratio
from prb_jax.models import Dtype, Together
from prb_jax.records.options import Options, option, same_option, section
from prb_jax.training.config import BatchSettings, CheckpointSettings, OptimizerSettings, Schedule

Algorithm = Literal["ppo", "grpo", "rloo", "reinforce++", "dpo", "sft"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
GROUPED: tuple[Algorithm, ...] = ("grpo", "rloo")
"""Algorithms that compare the responses of a prompt with each other."""
LABELLED: tuple[Algorithm, ...] = ("dpo", "sft")
"""Algorithms that learn from the labelled responses of the data, and draw nothing on their way."""
DRAWING: tuple[Algorithm, ...] = ("ppo", "grpo", "rloo", "reinforce++")
"""Algorithms that learn from rollouts."""


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Options, prefix="rollout."):
    """The texts that the policy writes in every step."""

    n: int = option(4, "rollouts of each prompt; together they are one tree.", least=1)
    temperature: float = option(
        1.0,
        "divides the logits, when texts are drawn and wherever their probabilities are computed.",
        above=0,
    )
    max_new_tokens: int = option(128, "most tokens of a rollout.", least=1)
    rows: int | None = option(
        None,
        "rollouts that are drawn at a time; None chooses by device. It decides speed, not results.",
        least=1,
    )
    keep_every: int | None = option(
        None,
        "steps between those whose first rollouts are kept in `rollouts.jsonl`; None for ten in a run.",
        least=1,
        effect="none",
    )
    keep: int = option(2, "prompts of such a step that are kept, with all rollouts.", least=1, effect="none")


@dataclass(frozen=True, kw_only=True)
class ScoringJudgeSettings(Options, prefix="scoring.judge."):
    """How a reward is asked that is a judge (`judge:MODEL`, `rubric:MODEL` or `pairs:MODEL`)."""

    template: str | None = option(
        None,
        "file with the text that asks `judge:` for a number, with the places {prompt} and {answer}; None "
        "for the project's own one.",
        effect="contents",
    )
    system: str | None = option(
        None,
        "file with the text of a system turn before it (`judge:`); None for none.",
        effect="contents",
    )
    lowest: int | None = option(
        None,
        "number of the scale of `judge:`; None for 1. `rubric:` always rates with 0, 1 and 2.",
    )
    highest: int | None = option(None, "number of that scale; None for 9.")
    pairing: str | None = option(
        None,
        "which rollouts of a prompt `pairs:` compares: all pairs (None), each with the next one, or winners only.",
        choices=PAIRINGS,
    )
    ties: str = option(
        HALF,
        "what a tie of `pairs:` is worth: half a win for both, a loss for both, or missing.",
        choices=TIES,
    )
    reason: bool = option(False, "whether the judge thinks in words before it names its number or verdict.")
    reason_tokens: int | None = option(
        None, "most tokens of a reply in words; None for 1,024 with reason, and else 16.", least=1
    )
    temperature: float = option(0.0, "of replies in words; above 0 they are drawn.", least=0)
    votes: int = option(1, "replies in words to every question, at a temperature above 0.", least=1)
    chat_template_kwargs: str | None = option(
        None,
        'JSON of values that the judge\'s chat template reads, as {"enable_thinking": true}; None for none.',
    )
    top_logprobs: int | None = option(
        None,
        "most probable tokens that an endpoint is asked for, of which the expected number is taken; None "
        "for the number in its reply.",
        least=1,
    )
    concurrency: int = option(8, "requests to an endpoint at a time.", least=1, effect="none")

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.scale or (1, 9)
        self.check("highest", low < high, f"more than the lowest number, {low}")

    @property
    def scale(self) -> tuple[int, int] | None:
        """The scale of `judge:`; None where it is the judge's own one."""
        if self.lowest is None and self.highest is None:
            return None
        return 1 if self.lowest is None else self.lowest, 9 if self.highest is None else self.highest


@dataclass(frozen=True, kw_only=True)
class ScoringSettings(Options, prefix="scoring."):
    """From the reward's score of a text to the score that is trained on."""

    scale: float = option(1.0, "multiplies the score, first of all (0.1 in the paper).")
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
        'rule for a rollout that was cut at max_new_tokens: "subtract" takes no_end_value away (TRL), '
        '"replace" puts it in place of the score (the "N+ implementation details", with -1).',
    )
    no_end_value: float | None = option(
        None,
        'of that rule; None for 1 with "subtract" and -1 with "replace", so that it never pays to be cut.',
    )
    free_tokens: int = option(0, "length up to which a rollout has no penalty.", least=0)
    token_penalty: float = option(0.0, "taken away for each token beyond that.")
    history: str | None = option(
        None,
        "labelled comparisons, as `data`, from which a reward that was fitted by `prb personalise` learns "
        "the users; None for other rewards, and where profiles are all that is known of users.",
        effect="contents",
    )
    profile_posts: int | None = option(
        None,
        "posts that the reward model is shown; None as it was trained.",
    )
    protocol: str | None = option(
        None,
        'of the reward model\'s text, "default" or "paper" (which cuts the end of long responses, as the '
        "paper's server does); None as it was trained.",
    )
    max_length: int | None = option(
        None,
        "most tokens of a conversation for the reward model; None as it was trained.",
    )
    dtype: Dtype | None = option(
        None,
        "of the reward model; None for that of its checkpoint.",
    )
    mesh: str | None = option(
        None,
        "of the reward model; None for that of the policy.",
        effect="none",
    )
    tokenizer: str | None = option(
        None,
        "of a reward behind `/classify` of SGLang, which takes token ids: folder or hub id of the tokenizer whose chat "
        "template renders the conversation.",
        effect="none",
    )
    reference: str | None = option(
        None,
        "the model from which `reward`, a policy, was trained by DPO: the score is the implicit reward, "
        "beta (log p_policy - log p_reference).",
        effect="contents",
    )
    beta: float = option(0.1, "factor of implicit rewards.", above=0)
    reference_free: bool = option(False, "implicit rewards without a reference: beta log p_policy.")
    logprobs: Together = option(
        "sum", "of `scoring.reference_free`: how log-probabilities of tokens become one number."
    )
    judge: ScoringJudgeSettings = section(ScoringJudgeSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        paid = self.no_end == "subtract" and self.no_end_value is not None and self.no_end_value < 0
        self.check("no_end_value", not paid, "at least 0, which scoring.no_end=subtract takes away")

    @property
    def value_of_no_end(self) -> float:
        """The number of the rule for rollouts that were cut."""
        if self.no_end_value is None:
            return -1.0 if self.no_end == "replace" else 1.0
        return self.no_end_value


@dataclass(frozen=True, kw_only=True)
class KlSettings(Options, prefix="kl."):
    """What holds the policy to the reference, the model that it started as."""

    place: Literal["reward", "loss"] | None = option(
        None,
        '"reward" takes coefficient * KL from the reward of each token; "loss" adds it to the loss. None '
        'for "loss" with grpo, which would divide the KL of rollouts of one score by its own deviation, and'
        ' else "reward".',
    )
    estimator: Estimator | None = option(
        None,
        "k1, k2 or k3 (`prb_jax.behaviour.rl.numbers.kl_estimate`); None for k1 in the reward and k3 in the loss, "
        "where k1 is refused: its expected gradient is 0.",
    )
    coefficient: float = option(0.05, "of the KL; 0 measures it and does nothing.", least=0)
    target: float | None = option(
        None,
        "KL of a whole response to which the coefficient is adapted, after every step; None keeps it fixed.",
        above=0,
    )
    horizon: float = option(
        10_000.0,
        "rollouts after which a constant error of a fifth has changed the coefficient by a fifth.",
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings(Options, prefix="advantage."):
    """How much better than expected a token was."""

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
        "the state after the last token has a value of its own and gets the score, as in TRL, so that the "
        "mask of values is one longer than that of tokens; otherwise the last token gets the score, and "
        "nothing follows (ppo).",
    )


@dataclass(frozen=True, kw_only=True)
class PolicyLossSettings(Options, prefix="loss."):
    """What is minimised."""

    clip: float = option(0.2, "how far the ratio of new to old probability may leave 1.", above=0)
    ratio: Ratio = option(
        "token",
        "of each token, or of the whole response (the geometric mean of its tokens' ratios, as in GSPO).",
    )
    aggregation: Aggregation = option(
        "token-mean", "how the losses of tokens become one: see `prb_jax.behaviour.rl.numbers.token_weights`."
    )
    entropy_coefficient: float = option(0.0, "of the entropy, which is added to what is maximised.", least=0)
    value_coefficient: float = option(0.1, "of the value loss (ppo).", least=0)
    value_clip: float | None = option(
        0.2, "how far a value may leave the old one; None for no limit (ppo).", above=0
    )
    dpo_beta: float = option(0.1, "how strongly the policy is held to the reference (dpo).", above=0)
    label_smoothing: float = option(0.0, "probability that a label is wrong (dpo).", least=0, below=0.5)


@dataclass(frozen=True, kw_only=True)
class ValueSettings(Options, prefix="value."):
    """The value function (ppo). It starts at 0 everywhere."""

    trunk: Literal["own", "shared"] = option(
        "own",
        '"own": a second copy of the model (with LoRA a second adapter) and a head; "shared": a head on the'
        " states of the policy, whose gradient goes into the policy too.",
    )
    learning_rate: float | None = option(None, "peak of its rate; None for that of the policy.", least=0)


@dataclass(frozen=True, kw_only=True)
class RolloutBatchSettings(Options, prefix="batch."):
    """What a step sees, and how often."""

    prompts: int = option(
        16, "prompts of a step; of pairs with dpo, of preferred responses with sft.", least=1
    )
    minibatch: int | None = option(None, "prompts of one update; None for all of the step.")
    epochs: int = option(1, "how many times a step goes through its rollouts.", least=1)
    tokens: int | None = same_option(BatchSettings, "tokens")
    max_buckets: int = option(4, "the most shapes of batches, and so compiles.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        part = self.minibatch
        fits = part is None or (part >= 1 and self.prompts % part == 0)
        self.check("minibatch", fits, f"a divisor of batch.prompts={self.prompts}, or None")

    @property
    def updates(self) -> int:
        """Updates of the optimiser in a step."""
        return self.epochs * (self.prompts // (self.minibatch or self.prompts))


@dataclass(frozen=True, kw_only=True)
class UpdateSettings(OptimizerSettings, prefix="optimizer."):
    """AdamW, of policy and value function each; epsilon is added to the root of the second moment (optax)."""

    learning_rate: float = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        3e-6, "the rate of the policy at its peak; 0 changes nothing.", least=0
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
        meaning="steps between checkpoints; None for ten in a run. SIGTERM saves one too.",
    )
    keep_last: int = same_option(CheckpointSettings, "keep_last")


@dataclass(frozen=True, kw_only=True)
class WatchSettings(Options, prefix="watch."):
    """What tells a better policy from one that has found a weakness of its reward."""

    gold: str | None = option(
        None,
        "a second reward, named as `reward`, that is measured and never trained on; None for none.",
        effect="contents",
    )
    data: str | None = option(
        None,
        "prompts that are not trained on, named as `data`: at the end the policy writes texts for them, "
        "which reward and gold score; None for none. dpo and sft, which draw no rollouts, are watched by it"
        " alone.",
        effect="contents",
    )
    every: int = option(
        1,
        "steps between two measurements of gold.",
        least=1,
    )
    window: int | None = option(
        None,
        "measurements that are averaged: the run stops where the mean of the last ones is below that of as "
        "many before them, while the reward rose; None never stops so.",
        least=1,
    )
    most_kl: float | None = option(
        None,
        "the run stops where the KL of a rollout has exceeded this; None never stops so.",
        above=0,
    )
