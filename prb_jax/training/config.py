"""Options of a training run with defaults, meanings and ranges, and the conversion of a config to settings.

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
from prb_jax.models.lora_config import LoraConfig
from prb_jax.records.config_files import build_settings, to_config_dict
from prb_jax.records.options import Options, check_given, option, section
from prb_jax.text.view import View
from prb_jax.training import Tuning

if TYPE_CHECKING:
    from ml_collections import ConfigDict

SCRATCH = "scratch"  # value of `model` for a new model with the sizes in section `scratch`

MethodName = Literal["user_blind", "profile_context", "persona_embedding"]

Schedule = Literal["constant", "linear", "cosine", "wsd"]

_RATES: dict[str, tuple[float, float]] = {"head": (4.0, 1e-2), "lora": (1.0, 2e-3), "full": (0.1, 1e-3)}
"""Default peak learning rate: (factor divided by the model width, upper limit).

For full fine-tuning 1e-4 at a width of 1,024 (TRL's default) and 2.4e-5 at the 4,096 of an 8B model."""

EVENTS = 10  # events in a run, evenly spaced, if an interval such as `checkpoint.every` is None


class RunOptions(Options):
    """Options shared by `prb train` and `prb ppo`, read by the loop, checkpoints and export."""

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
        """Number of steps between checkpoints."""
        return self.checkpoint.every or max(1, self.steps // EVENTS)

    @property
    def lora_scale(self) -> float:
        """Scale of the adapter updates; 1 if no adapters are trained."""
        return self.lora.scale if self.tuning == "lora" else 1.0

    @property
    def exported_dtype(self) -> str:
        """Dtype of the weights in `OUT/model`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LossSettings(Options, prefix="loss."):
    """Loss of one comparison; see `prb_jax.training.losses`."""

    kind: Literal["bradley_terry", "plackett_luce"] = option(
        "bradley_terry",
        '"bradley_terry" averages -log sigmoid(r_i - r_j - margin) over all pairs of responses of a '
        'comparison in which i has a higher label than j. "plackett_luce" is -log of the probability of the'
        " whole ranking. The two are equal for two responses.",
    )
    label_smoothing: float = option(0.0, "probability that a label is wrong, below 0.5.", least=0, below=0.5)
    center_rewards_coefficient: float | None = option(
        None,
        "weight of (r_i + r_j)^2, averaged over the same pairs, as in TRL; keeps rewards near 0. None "
        "omits the term.",
        least=0,
    )
    use_margin: bool = option(
        True, "subtract the `margin` of a comparison from the difference of its rewards."
    )
    user_weights: bool = option(
        False,
        "give every user the same total weight in the loss, however many comparisons the user has; a "
        "comparison without a user counts as a separate user.",
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Options, prefix="optimizer."):
    """AdamW; see `prb_jax.training.weights`."""

    learning_rate: float | None = option(
        None,
        "peak learning rate; None chooses by `tuning` and width (`TrainSettings.learning_rate`).",
        above=0,
    )
    schedule: Schedule = option(
        "cosine",
        'learning rate after the warm-up; "wsd" is constant and decays at the end.',
    )
    warmup_share: float = option(0.05, "share of the steps used for warm-up from 0.", least=0, most=1)
    decay_share: float = option(0.2, 'share of the steps used for the decay ("wsd").', least=0, most=1)
    final_share: float = option(0.1, "final learning rate as a share of the peak.", least=0, most=1)
    weight_decay: float = option(0.01, "weight decay of matrices; norms and biases do not decay.", least=0)
    b1: float = option(0.9, "decay of Adam's first moment.", least=0, below=1)
    b2: float = option(0.95, "decay of Adam's second moment.", least=0, below=1)
    eps: float = option(1e-8, "added to the root of Adam's second moment.", above=0)
    clip_norm: float | None = option(1.0, "maximum gradient norm; None disables clipping.", above=0)


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Options, prefix="batch."):
    """Data of one step."""

    comparisons: int = option(16, "comparisons in one step; an upper limit with `batch_by=user`.", least=1)
    tokens: int | None = option(
        None,
        "maximum tokens of a microbatch, padding included, for each shard of the batch on the mesh; a step "
        "is split into as many microbatches as necessary. None chooses by device and model. Affects"
        " memory and speed, not results.",
        least=1,
        effect="none",
    )
    max_buckets: int = option(
        4,
        "maximum number of microbatch shapes, each compiled once; another shape is added only if it saves "
        "more time than its compilation takes.",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class ValidationSettings(Options, prefix="validation."):
    """Comparisons held out to choose the best checkpoint, never from the test split."""

    data: str | None = option(
        None,
        "separate sources, named as in `data`; None holds out a share of the training data.",
        effect="contents",
    )
    fraction: float = option(
        0.1, "share of the training data to hold out; 0 disables validation.", least=0, below=1
    )
    by: Literal["auto", "user", "id"] = option(
        "auto",
        'unit to hold out: whole users, or single comparisons ("id"); "auto" takes users if there are at '
        "least two.",
    )
    every: int | None = option(
        None, "steps between validations; None for ten per run. The last step always validates.", least=1
    )
    limit: int | None = option(2_000, "maximum number of comparisons, evenly spaced; None for all.", least=1)
    metric: Literal["loss", "accuracy"] = option(
        "loss", "validation metric that chooses the best checkpoint."
    )
    test: str | None = option(
        None,
        "sources of the test data. Training or validating on an id of the test data is an error; so is "
        "validating on one of its users.",
        effect="contents",
    )
    shared_users: bool = option(
        False,
        "allow validation users that are also in `data` (if `validation.data` is given) or in `test`.",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Options, prefix="checkpoint."):
    """Saved states of the run."""

    every: int | None = option(
        None,
        "steps between checkpoints; None for ten per run. Validation and SIGTERM also save one.",
        least=1,
        effect="none",
    )
    keep_last: int = option(2, "number of newest checkpoints to keep.", least=1, effect="none")
    keep_best: int = option(
        1, "number of checkpoints with the best validation to keep.", least=0, effect="none"
    )


@dataclass(frozen=True, kw_only=True)
class UserEmbeddingSettings(Options, prefix="user_embedding."):
    """A learned soft prompt per user, for `method="persona_embedding"`."""

    tokens: int = option(8, "length of the soft prompt.", least=1)
    generic_share: float = option(
        0.3, "share of comparisons that train the generic user instead of their own user.", least=0, most=1
    )
    learning_rate: float | None = option(
        None, "peak learning rate of soft prompts; None for ten times the optimiser's rate."
    )


@dataclass(frozen=True, kw_only=True)
class ScratchSettings(Options, prefix="scratch."):
    """A new model for `model="scratch"`: a decoder with random weights."""

    model_type: Literal["llama", "qwen2", "qwen3"] = option("qwen3", "model family.")
    hidden_size: int = option(128, "same as in `config.json`.", least=1)
    intermediate_size: int = option(384, "same as in `config.json`.", least=1)
    num_hidden_layers: int = option(4, "same as in `config.json`.", least=1)
    num_attention_heads: int = option(4, "same as in `config.json`.", least=1)
    num_key_value_heads: int = option(2, "same as in `config.json`.", least=1)
    head_dim: int = option(32, "same as in `config.json`.", least=1)
    max_position_embeddings: int = option(4096, "same as in `config.json`.", least=1)
    rope_theta: float = option(10_000.0, "same as in `config.json`.")
    tokenizer: str | None = option(
        None,
        "folder or hub id of a tokenizer; None trains a byte-level BPE tokenizer on the training data.",
        effect="contents",
    )
    vocab_size: int = option(4096, "vocabulary size of a tokenizer trained here.", least=1)


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Options, prefix="export."):
    """The Hugging Face folder that a finished run leaves in `OUT/model`."""

    checkpoint: Literal["best", "last"] = option(
        "best", "best checkpoint by validation (the last one without validation), or the last one."
    )
    dtype: Dtype | None = option(
        None, "dtype of all weights except the head, which is float32; None for `dtype`."
    )


@dataclass(frozen=True, kw_only=True)
class LogSettings(Options, prefix="log."):
    """Logs of the run in addition to `metrics.jsonl`, which is always written."""

    tensorboard: bool = option(True, "write event files to `OUT/tensorboard`.", effect="none")
    wandb: str | None = option(None, "Weights & Biases project; None disables it.", effect="none")
    plot: bool = option(True, "draw `OUT/learning_curves.png`.", effect="none")


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
        "comparisons to train on, given as for `prb evaluate --data`; several sources, separated by commas, "
        'are read in turn. Sources with splits provide "train".',
        "PATH",
        effect="contents",
        required="a file, folder or data set",
    )
    subset: str | None = option(None, "read only this subset of each source.")
    limit: int | None = option(None, "maximum number of comparisons per source.", least=1)
    steps: int = option(1_000, "optimiser updates; rerun with a larger number to lengthen the run.", least=1)
    seed: int = option(0, "seed for new weights and for the order of the data.", least=0)
    dtype: Dtype = option(
        "float32",
        "dtype of activations and frozen weights; trained weights, gradients and the head are float32.",
    )
    mesh: str | None = option(
        None,
        'sizes of the mesh axes, e.g. "fsdp=4,tensor=2"; None splits parameters over all devices.',
        effect="none",
    )
    method: MethodName = option(
        "user_blind",
        "information about the user that the model gets: none, the profile in its context, or a learned soft "
        "prompt.",
    )
    tuning: Tuning = option(
        "full", "part to train: the score head, low-rank updates and the head, or all weights."
    )
    profile_posts: int = option(10, 'maximum profile posts in the context ("profile_context").', least=0)
    max_length: int | None = option(
        None, "maximum conversation length in tokens; None for the model's limit.", least=1
    )
    init_head: bool = option(
        False, "create a new score head if the checkpoint has none, or one with several outputs."
    )
    revision: str | None = option(None, "branch, tag or commit of a model on the hub.", effect="contents")
    base: str | None = option(
        None,
        "base model of a PEFT adapter to start from: a folder or hub id; None uses the base the adapter names.",
        effect="contents",
    )
    tokenizer: str | None = option(
        None, "folder or hub id of the tokenizer; None for the model's.", effect="contents"
    )
    chat_template: str | None = option(
        None, 'Jinja file, or "plain", for models without a chat template.', effect="contents"
    )
    batch_by: Literal["comparison", "user"] = option(
        "comparison",
        "unit that fills a step: single comparisons, or whole users, so each profile is computed once"
        " per step.",
    )
    remat: Remat = option(
        REMAT,
        "activations that the backward pass recomputes instead of storing: norms and activation functions (dots), "
        "also matrix products (full), nothing (none), or dots if it fits into the memory, else full (auto).",
        effect="none",
    )
    attention: AttentionName = option(
        "auto",
        'attention implementation: chosen for the machine ("auto"), or the XLA program ("xla").',
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
        """The part of a comparison that the model sees."""
        posts = self.profile_posts if self.method == "profile_context" else 0
        return View(posts, max_length=self.max_length)

    def learning_rate(self, *, hidden_size: int) -> float:
        """Return the peak learning rate for a model of this width."""
        given = self.optimizer.learning_rate
        factor, most = _RATES[self.tuning]
        return min(most, factor / hidden_size) if given is None else given

    def optimizer_of(self, *, hidden_size: int) -> OptimizerSettings:
        """Return the optimiser settings with a `learning_rate`."""
        return replace(self.optimizer, learning_rate=self.learning_rate(hidden_size=hidden_size))

    def validates_at(self, step: int, lengths: Sequence[int]) -> bool:
        """Return True if this step ends with a validation; for `lengths` see `prb_jax.training.weights`."""
        length = next(length for length in lengths if step <= length)
        every = self.validation.every or max(1, length // EVENTS)
        return step == length or step % every == 0

    @property
    def exported_dtype(self) -> str:
        return self.export.dtype or self.dtype


Config: TypeAlias = "str | Path | ConfigDict | Mapping[str, Any] | TrainSettings"


def default_config() -> ConfigDict:
    """Return every option with its default. Keys cannot be added, and values keep their types."""
    return to_config_dict(TrainSettings())


def load_settings(
    config: Config | None, overrides: Sequence[str] = (), *, complete: bool = True, given: Sequence[str] = ()
) -> TrainSettings:
    """Return the checked settings of a config with overrides applied.

    Args:
      config, overrides: Same as in :func:`prb_jax.records.config_files.build_settings`.
      complete: If True, require a model and data.
      given: Keys that the settings may omit because the caller has the values, e.g. "data".

    Raises:
      RunError: The config has an unknown key (the message names the nearest one) or a wrong type, or lacks a model or
        data.
      DataError: A value is out of range.
    """
    settings = build_settings(TrainSettings, config, overrides)
    if complete:
        check_given(settings, but=given)
    return settings
