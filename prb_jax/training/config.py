"""The options of a training run, each with its default, meaning and range, and how a config becomes settings.

A config file is a Python file with a function that returns an ml_collections `ConfigDict`, or a dict of the keys to
change:

    from prb_jax.training.config import default_config

    def get_config():
        config = default_config()
        config.method = "profile_context"
        config.optimizer.learning_rate = 3e-4
        return config
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from prb_jax.models import REMAT, AttentionName, Dtype, Remat
from prb_jax.models.lora import LoraConfig
from prb_jax.records.config_files import build_settings, to_config_dict
from prb_jax.records.options import Options, check_given, option, section
from prb_jax.text.view import View
from prb_jax.training import Tuning

if TYPE_CHECKING:
    from ml_collections import ConfigDict

SCRATCH = "scratch"  # as `model`: no checkpoint, but a new model of the sizes in the section `scratch`

MethodName = Literal["user_blind", "profile_context", "persona_embedding"]

Schedule = Literal["constant", "linear", "cosine", "wsd"]

_RATES: dict[str, tuple[float, float]] = {"head": (4.0, 1e-2), "lora": (1.0, 2e-3), "full": (0.1, 1e-3)}
"""The peak of the learning rate where none is given: so much over the width of the model, at most so much.

For full fine-tuning 1e-4 at a width of 1,024 (TRL's default) and 2.4e-5 at the 4,096 of an 8B model."""

EVENTS = 10  # where an interval is None, as `checkpoint.every`: so many times in a run, evenly spaced


class RunOptions(Options):
    """The options that `prb train` and `prb ppo` have in common: the loop, checkpoints and export read them."""

    steps: int
    seed: int
    dtype: Dtype
    tuning: Any
    remat: Remat
    attention: AttentionName
    lora: LoraConfig
    batch: Any
    checkpoint: Any
    log: LogSettings

    @property
    def checkpoint_every(self) -> int:
        """Steps between two checkpoints."""
        return self.checkpoint.every or max(1, self.steps // EVENTS)

    @property
    def lora_scale(self) -> float:
        """The factor of the updates of adapters; 1 where none are trained."""
        return self.lora.scale if self.tuning == "lora" else 1.0

    @property
    def exported_dtype(self) -> str:
        """The type of the weights in `OUT/model`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LossSettings(Options, prefix="loss."):
    """The loss of one comparison; see `prb_jax.training.losses`."""

    kind: Literal["bradley_terry", "plackett_luce"] = option(
        "bradley_terry",
        '"bradley_terry" averages -log sigmoid(r_i - r_j - margin) over all pairs of responses of a '
        'comparison in which i has a higher label than j; "plackett_luce" is -log of the probability of the'
        " whole ranking. For two responses they are equal.",
    )
    label_smoothing: float = option(0.0, "probability that a label is wrong, below 0.5.", least=0, below=0.5)
    center_rewards_coefficient: float | None = option(
        None,
        "weight of (r_i + r_j)^2, averaged over the same pairs, as in TRL: it keeps rewards near 0. None "
        "leaves it out.",
        least=0,
    )
    use_margin: bool = option(
        True, "subtracts the `margin` of a comparison from the difference of its rewards."
    )
    user_weights: bool = option(
        False,
        "gives every user the same weight in the loss, however many comparisons each has; a comparison "
        "without a user counts as one user.",
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Options, prefix="optimizer."):
    """AdamW; see `prb_jax.training.weights`."""

    learning_rate: float | None = option(
        None,
        "the rate at its peak; None chooses by `tuning` and width (`TrainSettings.learning_rate`).",
        above=0,
    )
    schedule: Schedule = option(
        "cosine",
        'course of the learning rate after the warm-up; "wsd" is constant and then falls at the end.',
    )
    warmup_share: float = option(0.05, "share of the steps in which the rate rises from 0.", least=0, most=1)
    decay_share: float = option(0.2, 'share of the steps in which it falls ("wsd").', least=0, most=1)
    final_share: float = option(0.1, "share of the peak that is left at the end.", least=0, most=1)
    weight_decay: float = option(0.01, "decay of matrices; norms and biases have none.", least=0)
    b1: float = option(0.9, "decay of Adam's first moment.", least=0, below=1)
    b2: float = option(0.95, "decay of Adam's second moment.", least=0, below=1)
    eps: float = option(1e-8, "added to the root of Adam's second moment.", above=0)
    clip_norm: float | None = option(1.0, "largest norm of the gradient; None for no clipping.", above=0)


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Options, prefix="batch."):
    """What one step sees."""

    comparisons: int = option(16, "comparisons in one step; with `batch_by=user` at most.", least=1)
    tokens: int | None = option(
        None,
        "most tokens of a microbatch with its padding, for each part into which the mesh splits a batch; a "
        "step is computed in as many microbatches as it needs. None chooses by device and model. It decides"
        " memory and speed, not results.",
        least=1,
        effect="none",
    )
    max_buckets: int = option(
        4,
        "the most shapes of microbatches, and so compiles: one, or two where a second saves more time than it "
        "takes to compile.",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class ValidationSettings(Options, prefix="validation."):
    """Comparisons held out to choose the best checkpoint. Never the test split."""

    data: str | None = option(
        None,
        "sources of their own, named as those in `data`; None to hold out a share of the training data.",
        effect="contents",
    )
    fraction: float = option(
        0.1, "share of the training data that is held out; 0 for no validation.", least=0, below=1
    )
    by: Literal["auto", "user", "id"] = option(
        "auto",
        "unit that is held out: whole users, single comparisons, or users where there are at least two.",
    )
    every: int | None = option(
        None, "steps between validations; None for ten in a run. The last step always validates.", least=1
    )
    limit: int | None = option(2_000, "at most so many comparisons, evenly spaced; None for all.", least=1)
    metric: Literal["loss", "accuracy"] = option(
        "loss", "number of the validation that makes a checkpoint the best one."
    )
    test: str | None = option(
        None,
        "sources of the test data. Training or validating on one of their ids is an error, and so is "
        "validating on one of their users.",
        effect="contents",
    )
    shared_users: bool = option(
        False,
        "allows validation users that are also in `data` (when `validation.data` is given) or in `test`.",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Options, prefix="checkpoint."):
    """Saved states of the run."""

    every: int | None = option(
        None,
        "steps between checkpoints; None for ten in a run. Validation and SIGTERM save one too.",
        least=1,
        effect="none",
    )
    keep_last: int = option(2, "number of the newest checkpoints that are kept.", least=1, effect="none")
    keep_best: int = option(1, "number of the best by validation that are kept.", least=0, effect="none")


@dataclass(frozen=True, kw_only=True)
class UserEmbeddingSettings(Options, prefix="user_embedding."):
    """A learned soft prompt for every user, for `method="persona_embedding"`."""

    tokens: int = option(8, "length of the soft prompt.", least=1)
    generic_share: float = option(
        0.3, "share of the comparisons that train the generic user instead of their own.", least=0, most=1
    )
    learning_rate: float | None = option(
        None, "peak of the rate for soft prompts; None for ten times that of the optimiser."
    )


@dataclass(frozen=True, kw_only=True)
class ScratchSettings(Options, prefix="scratch."):
    """A new model, for `model="scratch"`: the decoder of a family with random weights."""

    model_type: Literal["llama", "qwen2", "qwen3"] = option("qwen3", "the family.")
    hidden_size: int = option(128, "as in `config.json`.", least=1)
    intermediate_size: int = option(384, "as in `config.json`.", least=1)
    num_hidden_layers: int = option(4, "as in `config.json`.", least=1)
    num_attention_heads: int = option(4, "as in `config.json`.", least=1)
    num_key_value_heads: int = option(2, "as in `config.json`.", least=1)
    head_dim: int = option(32, "as in `config.json`.", least=1)
    max_position_embeddings: int = option(4096, "as in `config.json`.", least=1)
    rope_theta: float = option(10_000.0, "as in `config.json`.")
    tokenizer: str | None = option(
        None,
        "folder or hub id of a tokenizer; None trains a byte-level BPE on the training data.",
        effect="contents",
    )
    vocab_size: int = option(4096, "number of tokens of a tokenizer trained here.", least=1)


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Options, prefix="export."):
    """The Hugging Face folder that a finished run leaves in `OUT/model`."""

    checkpoint: Literal["best", "last"] = option(
        "best", "the best one by validation (the last where there is no validation), or the last."
    )
    dtype: Dtype | None = option(
        None, "type of the weights but for the head, which is float32; None for `dtype`."
    )


@dataclass(frozen=True, kw_only=True)
class LogSettings(Options, prefix="log."):
    """What is written along the way. `metrics.jsonl` always is."""

    tensorboard: bool = option(True, "writes event files in `OUT/tensorboard`.", effect="none")
    wandb: str | None = option(None, "project of Weights & Biases; None for none.", effect="none")
    plot: bool = option(True, "draws `OUT/learning_curves.png`.", effect="none")


@dataclass(frozen=True, kw_only=True)
class TrainSettings(RunOptions):
    """One training run."""

    model: str | None = option(
        None,
        'Hugging Face folder, PEFT adapter, hub id or run of `prb train` to start from, or "scratch".',
        "PATH",
        effect="contents",
        required="a folder, a hub id or 'scratch'",
    )
    data: str | None = option(
        None,
        "comparisons to train on: what `prb evaluate --data` takes; several, with commas between them, are "
        'read in turn. Of sources with splits it is "train".',
        "PATH",
        effect="contents",
        required="a file, folder or data set",
    )
    subset: str | None = option(None, "reads this subset of each source alone.")
    limit: int | None = option(None, "at most so many comparisons of each source.", least=1)
    steps: int = option(1_000, "updates of the optimiser; a larger number later lengthens the run.", least=1)
    seed: int = option(0, "decides new weights and the order of the data.", least=0)
    dtype: Dtype = option(
        "float32",
        "type of activations and frozen weights; trained weights, gradients and the head are float32.",
    )
    mesh: str | None = option(
        None,
        'sizes of its axes, as "fsdp=4,tensor=2"; None splits parameters over all devices.',
        effect="none",
    )
    method: MethodName = option(
        "user_blind",
        "knowledge of the user that the model has: nothing, the profile in its context, or a learned soft "
        "prompt.",
    )
    tuning: Tuning = option(
        "full", "the part that is trained: the score head, low-rank updates and the head, or everything."
    )
    profile_posts: int = option(10, 'most posts of the profile in the context ("profile_context").', least=0)
    max_length: int | None = option(
        None, "longest conversation in tokens; None for the model's own limit.", least=1
    )
    init_head: bool = option(
        False, "makes a new score head where the checkpoint has none (or one with several outputs)."
    )
    revision: str | None = option(None, "branch, tag or commit of a model on the hub.", effect="contents")
    base: str | None = option(
        None,
        "base model of a PEFT adapter to start from: a folder or hub id; None for the one that the adapter names.",
        effect="contents",
    )
    tokenizer: str | None = option(
        None, "folder or hub id of the tokenizer; None for the model's.", effect="contents"
    )
    chat_template: str | None = option(
        None, 'Jinja file, or "plain", for models without a template of their own.', effect="contents"
    )
    batch_by: Literal["comparison", "user"] = option(
        "comparison",
        "unit by which steps are filled: single comparisons, or whole users, whose profile is then computed"
        " once a step.",
    )
    remat: Remat = option(REMAT, "activations that the backward pass computes again instead of keeping them.")
    attention: AttentionName = option(
        "auto",
        'its implementation: the machine\'s own choice ("auto"), or the XLA program ("xla").',
        effect="none",
    )
    loss: LossSettings = section(LossSettings)
    optimizer: OptimizerSettings = section(OptimizerSettings)
    lora: LoraConfig = section(LoraConfig)
    batch: BatchSettings = section(BatchSettings)
    validation: ValidationSettings = section(ValidationSettings)
    checkpoint: CheckpointSettings = section(CheckpointSettings)
    user_embedding: UserEmbeddingSettings = section(UserEmbeddingSettings)
    scratch: ScratchSettings = section(ScratchSettings)
    export: ExportSettings = section(ExportSettings)
    log: LogSettings = section(LogSettings)

    @property
    def view(self) -> View:
        """What the model is shown of a comparison."""
        posts = self.profile_posts if self.method == "profile_context" else 0
        return View(posts, max_length=self.max_length)

    def learning_rate(self, *, hidden_size: int) -> float:
        """The peak of the learning rate for a model of this width."""
        given = self.optimizer.learning_rate
        factor, most = _RATES[self.tuning]
        return min(most, factor / hidden_size) if given is None else given

    def optimizer_of(self, *, hidden_size: int) -> OptimizerSettings:
        """The optimiser, with its `learning_rate`."""
        return replace(self.optimizer, learning_rate=self.learning_rate(hidden_size=hidden_size))

    def validates_at(self, step: int, lengths: Sequence[int]) -> bool:
        """Tell whether there is a validation after this step; `lengths` as in `prb_jax.training.weights`."""
        length = next(length for length in lengths if step <= length)
        every = self.validation.every or max(1, length // EVENTS)
        return step == length or step % every == 0

    @property
    def exported_dtype(self) -> str:
        return self.export.dtype or self.dtype


Config: TypeAlias = "str | Path | ConfigDict | Mapping[str, Any] | TrainSettings"


def default_config() -> ConfigDict:
    """Every option with its default. Keys cannot be added, and values keep their types."""
    return to_config_dict(TrainSettings())


def load_settings(
    config: Config | None, overrides: Sequence[str] = (), *, complete: bool = True, given: Sequence[str] = ()
) -> TrainSettings:
    """Return the checked settings of a config with overrides applied.

    Args:
      config, overrides: as of :func:`prb_jax.records.config_files.build_settings`.
      complete: a model and data must be given.
      given: keys whose values the caller has, so that the settings need not name any: "data".

    Raises:
      RunError: an unknown key (naming the nearest one), a wrong type, or no model or data.
      DataError: a value out of range.
    """
    settings = build_settings(TrainSettings, config, overrides)
    if complete:
        check_given(settings, but=given)
    return settings
