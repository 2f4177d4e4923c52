"""Every option of a training run: its name, type, default and meaning.

These frozen dataclasses are the one place where options are defined; `prb_jax.training.config` turns
them into ml_collections configs and back, and checks names and types on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from prb_jax.errors import DataError, quote
from prb_jax.models import REMAT, Dtype, Remat, TrainedAttention
from prb_jax.models.lora import LoraConfig
from prb_jax.text.view import View
from prb_jax.training import Tuning

SCRATCH = "scratch"
"""As `model`: no checkpoint, but a new model of the sizes in the section `scratch`."""

Method = Literal["user_blind", "profile_context", "persona_embedding"]

_RATES: dict[str, tuple[float, float]] = {"head": (4.0, 1e-2), "lora": (1.0, 2e-3), "full": (0.1, 1e-3)}


def default_learning_rate(tuning: str, *, hidden_size: int) -> float:
    """The peak where `optimizer.learning_rate` is None: in inverse proportion to the width of the model.

    For full fine-tuning 1e-4 at a width of 1,024 (TRL's default) and 2.4e-5 at the 4,096 of an 8B model; ten
    times that for LoRA, forty times for a head alone; never above 1e-3, 2e-3 and 1e-2.
    """
    factor, most = _RATES[tuning]
    return min(most, factor / hidden_size)


EVENTS = 10
"""Where `validation.every` or `checkpoint.every` is None: so many times in a run, evenly spaced."""


def _check(section: Any, key: str, ok: bool, expected: str) -> None:
    if not ok:
        found = getattr(section, key.rpartition(".")[2])
        raise DataError(f"{key}: expected {expected}, found {quote(found)}")


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The loss of one comparison; see `prb_jax.training.losses`.

    Attributes:
      kind: "bradley_terry" averages -log sigmoid(r_i - r_j - margin) over all pairs of responses of a comparison in
        which i has a higher label than j; "plackett_luce" is -log of the probability of the whole ranking. For two
        responses they are equal.
      label_smoothing: probability that a label is wrong, below 0.5.
      center_rewards_coefficient: weight of (r_i + r_j)^2, averaged over the same pairs, as in TRL: it keeps rewards
        near 0. None leaves it out.
      use_margin: subtracts the `margin` of a comparison from the difference of its rewards.
      user_weights: gives every user the same weight in the loss, however many comparisons each has; a comparison
        without a user counts as one user.
    """

    kind: Literal["bradley_terry", "plackett_luce"] = "bradley_terry"
    label_smoothing: float = 0.0
    center_rewards_coefficient: float | None = None
    use_margin: bool = True
    user_weights: bool = False

    def __post_init__(self) -> None:
        coefficient = self.center_rewards_coefficient
        kinds = get_args(get_type_hints(LossSettings)["kind"])
        _check(self, "loss.kind", self.kind in kinds, " or ".join(kinds))
        _check(self, "loss.label_smoothing", 0 <= self.label_smoothing < 0.5, "at least 0 and less than 0.5")
        _check(
            self,
            "loss.center_rewards_coefficient",
            coefficient is None or coefficient >= 0,
            "at least 0 or None",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW; see `prb_jax.training.optimizer`.

    Attributes:
      learning_rate: the rate at its peak; None chooses by `tuning` and width (`default_learning_rate`).
      schedule: course of the learning rate after the warm-up; "wsd" is constant and then falls at the end.
      warmup_share: share of the steps in which the learning rate rises from 0.
      decay_share: share of the steps in which it falls ("wsd").
      final_share: share of the peak that is left at the end.
      weight_decay: decay of matrices; norms and biases have none.
      b1: decay of Adam's first moment.
      b2: decay of Adam's second moment.
      eps: added to the root of Adam's second moment.
      clip_norm: largest global norm of the gradient; None for no clipping.
    """

    learning_rate: float | None = None
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_share: float = 0.05
    decay_share: float = 0.2
    final_share: float = 0.1
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, expected: str) -> None:
            _check(self, f"optimizer.{name}", ok, expected)

        schedules = get_args(get_type_hints(OptimizerSettings)["schedule"])
        check("learning_rate", self.learning_rate is None or self.learning_rate > 0, "more than 0")
        check("schedule", self.schedule in schedules, f"one of {', '.join(schedules)}")
        for name in ("warmup_share", "decay_share", "final_share"):
            check(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        check("weight_decay", self.weight_decay >= 0, "at least 0")
        check("b1", 0 <= self.b1 < 1, "at least 0 and less than 1")
        check("b2", 0 <= self.b2 < 1, "at least 0 and less than 1")
        check("eps", self.eps > 0, "more than 0")
        check("clip_norm", self.clip_norm is None or self.clip_norm > 0, "more than 0, or None")


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """What one step sees.

    Attributes:
      comparisons: comparisons in one step of the optimiser; with `batch_by=user` at most.
      tokens: most tokens of a microbatch with its padding, for each part into which the mesh splits a batch; a step is
        computed in as many microbatches as it needs. None chooses by device and model. It decides memory and speed,
        not results.
      max_buckets: the most shapes of batches, and so compiles; where trees are packed into streams (on CPUs, and
        on TPUs in bfloat16), two are the most.
    """

    comparisons: int = 16
    tokens: int | None = None
    max_buckets: int = 4


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """Comparisons held out to choose the best checkpoint. Never the test split.

    Attributes:
      data: sources of their own, named as those in `data`; None to hold out a share of the training data.
      fraction: share of the training data that is held out; 0 for no validation.
      by: unit that is held out: whole users, single comparisons, or users where there are at least two.
      every: steps between validations; None for ten in a run. The last step always validates.
      limit: at most so many comparisons, evenly spaced; None for all.
      metric: number of the validation that makes a checkpoint the best one.
      test: sources of the test data. Training or validating on one of their ids is an error, and so is
        validating on one of their users.
      shared_users: allows validation users that are also in `data` (when `validation.data` is given) or in `test`.
    """

    data: str | None = None
    fraction: float = 0.1
    by: Literal["auto", "user", "id"] = "auto"
    every: int | None = None
    limit: int | None = 2_000
    metric: Literal["loss", "accuracy"] = "loss"
    test: str | None = None
    shared_users: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Saved states of the run.

    Attributes:
      every: steps between checkpoints; None for ten in a run. Validation and SIGTERM save one too.
      keep_last: number of the newest checkpoints that are kept.
      keep_best: number of the best checkpoints by validation that are kept.
    """

    every: int | None = None
    keep_last: int = 2
    keep_best: int = 1


@dataclass(frozen=True, kw_only=True)
class UserEmbeddingSettings:
    """A learned soft prompt for every user, for `method="persona_embedding"`.

    Attributes:
      tokens: length of the soft prompt.
      generic_share: share of the comparisons that train the generic user instead of their own.
      learning_rate: peak of the rate for soft prompts; None for ten times that of the optimiser.
    """

    tokens: int = 8
    generic_share: float = 0.3
    learning_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class ScratchSettings:
    """A new model, for `model="scratch"`: the decoder of a family with random weights.

    Attributes:
      model_type: the family.
      hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
        head_dim, max_position_embeddings, rope_theta: as in `config.json`.
      tokenizer: folder or hub id of a tokenizer; None trains a byte-level BPE on the training data.
      vocab_size: number of tokens of a tokenizer trained here.
    """

    model_type: Literal["llama", "qwen2", "qwen3"] = "qwen3"
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 4096
    rope_theta: float = 10_000.0
    tokenizer: str | None = None
    vocab_size: int = 4096


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """The Hugging Face folder that a finished run leaves in `OUT/model`.

    Attributes:
      checkpoint: the best one by validation (the last where there is no validation), or the last.
      dtype: type of the weights but for the head, which is float32; None for `dtype`.
    """

    checkpoint: Literal["best", "last"] = "best"
    dtype: Dtype | None = None


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What is written along the way. `metrics.jsonl` always is.

    Attributes:
      tensorboard: writes event files in `OUT/tensorboard`.
      wandb: project of Weights & Biases; None for none.
      plot: draws `OUT/learning_curves.png`.
    """

    tensorboard: bool = True
    wandb: str | None = None
    plot: bool = True


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One training run.

    Attributes:
      model: Hugging Face folder, hub id or run of `prb train` to start from, or "scratch".
      data: comparisons to train on: what `prb evaluate --data` takes; several, with commas between
        them, are read in turn. Of sources with splits it is "train".
      subset: reads this subset of each source alone.
      limit: at most so many comparisons of each source.
      steps: updates of the optimiser; a larger number later lengthens the run.
      seed: decides new weights and the order of the data.
      dtype: type of activations and frozen weights; trained weights, gradients and the head are float32.
      mesh: sizes of its axes, as "fsdp=4,tensor=2"; None splits parameters over all devices.
      method: knowledge of the user that the model has: nothing, the profile in its context, or a learned soft prompt.
      tuning: the part that is trained: the score head, low-rank updates and the head, or everything.
      profile_posts: most posts of the profile in the context ("profile_context").
      max_length: longest conversation in tokens; None for the model's own limit.
      init_head: makes a new score head where the checkpoint has none (or one with several outputs).
      revision: branch, tag or commit of a model on the hub.
      tokenizer: folder or hub id of the tokenizer; None for the model's.
      chat_template: Jinja file, or "plain", for models without a template of their own.
      batch_by: unit by which steps are filled: single comparisons, or whole users, whose profile is then computed once
        a step on CPUs.
      remat: activations that the backward pass computes again instead of keeping them.
      attention: its implementation: the machine's own choice ("auto"), the block-wise XLA program, or the
        machine's kernel.
    """

    model: str | None = None
    data: str | None = None
    subset: str | None = None
    limit: int | None = None
    steps: int = 1_000
    seed: int = 0
    dtype: Dtype = "float32"
    mesh: str | None = None
    method: Method = "user_blind"
    tuning: Tuning = "full"
    profile_posts: int = 10
    max_length: int | None = None
    init_head: bool = False
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    batch_by: Literal["comparison", "user"] = "comparison"
    remat: Remat = REMAT
    attention: TrainedAttention = "auto"
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    lora: LoraConfig = field(default_factory=LoraConfig)
    batch: BatchSettings = field(default_factory=BatchSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    user_embedding: UserEmbeddingSettings = field(default_factory=UserEmbeddingSettings)
    scratch: ScratchSettings = field(default_factory=ScratchSettings)
    export: ExportSettings = field(default_factory=ExportSettings)
    log: LogSettings = field(default_factory=LogSettings)

    @property
    def view(self) -> View:
        """What the model is shown of a comparison."""
        posts = self.profile_posts if self.method == "profile_context" else 0
        return View(posts, max_length=self.max_length)

    def learning_rate(self, *, hidden_size: int) -> float:
        """The peak of the learning rate for a model of this width."""
        given = self.optimizer.learning_rate
        return default_learning_rate(self.tuning, hidden_size=hidden_size) if given is None else given

    def validates_at(self, step: int, lengths: Sequence[int]) -> bool:
        """Tell whether there is a validation after this step; `lengths` as in `prb_jax.training.optimizer`."""
        length = next(length for length in lengths if step <= length)
        every = self.validation.every or max(1, length // EVENTS)
        return step == length or step % every == 0

    @property
    def checkpoint_every(self) -> int:
        """Steps between two checkpoints."""
        return self.checkpoint.every or max(1, self.steps // EVENTS)


def sources(text: str | None) -> list[str]:
    """The names in `data`, `validation.data` or `validation.test`: one, or several with commas between them."""
    if not text:
        return []
    if Path(text).exists():  # a path may hold commas
        return [text]
    return [name.strip() for name in text.split(",") if name.strip()]
