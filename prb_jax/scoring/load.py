"""Load a scorer: a reward model, a fitted method, a baseline, a function, or a server that scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, overload

from prb_jax.models import Together
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.options import from_flat
from prb_jax.scoring.open_scorer import load_by_name

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from numpy.typing import DTypeLike

    from prb_jax.scoring.baselines import BaselineName
    from prb_jax.scoring.implicit import ImplicitRewards
    from prb_jax.scoring.personalised import PersonalisedModel
    from prb_jax.scoring.plain import PlainScorer
    from prb_jax.scoring.reward_model import RewardModel


@overload
def load(model: BaselineName) -> PlainScorer: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def load(
    model: str | Path,
    *,
    mesh: str | Mesh | None = ...,
    dtype: DTypeLike | None = ...,
    revision: str | None = ...,
    base: str | Path | None = ...,
    chat_template: str | None = ...,
    readout: str | None = ...,
    tokenizer: str | Path | None = ...,
    quantize: str | None = ...,
    attention: str = ...,
) -> RewardModel: ...
@overload
def load(
    model: str | Path,
    *,
    mesh: str | Mesh | None = ...,
    dtype: DTypeLike | None = ...,
    revision: str | None = ...,
    base: str | Path | None = ...,
    chat_template: str | None = ...,
    tokenizer: str | Path | None = ...,
    quantize: str | None = ...,
    attention: str = ...,
    reference: str | Path | None = ...,
    beta: float = ...,
    reference_free: bool = ...,
    logprobs: Together = ...,
) -> ImplicitRewards: ...
def load(
    model: str | Path,
    *,
    mesh: str | Mesh | None = None,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
    base: str | Path | None = None,
    chat_template: str | None = None,
    readout: str | None = None,
    tokenizer: str | Path | None = None,
    quantize: str | None = None,
    attention: str = "auto",
    reference: str | Path | None = None,
    beta: float = 0.1,
    reference_free: bool = False,
    logprobs: Together = "sum",
) -> RewardModel | PlainScorer | PersonalisedModel | ImplicitRewards:
    """Load a reward model from a Hugging Face folder or hub id, or a fitted method of personalisation.

    Args:
      model: Folder with ``config.json``, safetensors and tokenizer files; folder of a PEFT adapter; or a hub id. The
        name of a baseline, e.g. "baseline:length", or of a function of a comparison, "FILE.py:NAME" or
        "plugin:NAME" (see `docs/plugins.md`), gives a :class:`prb_jax.scoring.plain.PlainScorer`, which has no options.
        A folder that `prb personalise` wrote for a method gives a
        :class:`prb_jax.scoring.personalised.PersonalisedModel`, whose only option is ``mesh``.
      mesh: Sizes of the mesh axes, e.g. "fsdp=4,tensor=2" (-1: all remaining devices), or a mesh of
        :func:`prb_jax.platform.meshes.make_mesh`. If not given, parameters are split over all devices.
        A mesh with other axes, e.g. of another library, only provides its devices.
      dtype: Type of weights and activations: "float32" or "bfloat16" (or `jnp.float32`). If not given, the checkpoint's
        type, and bfloat16 for a float16 checkpoint.
      revision: Branch, tag or commit of a hub id.
      base: Base model of a PEFT adapter, if it is not the adapter's `base_model_name_or_path`.
      chat_template: "plain", a Jinja file, or its text, instead of the tokenizer's own template.
      readout: Row of :data:`prb_jax.models.readouts.registry.REGISTRY`, if the files do not name one;
        ``vocabulary:ID`` for a logit of a language model; ``ROW:min`` (``product``, ``mean``, ``last``) to combine the
        steps of a process model into one reward; ``steps:ID`` for two labels at every token with this id; or the
        logit that is the reward, for heads with several labels: see
        :func:`prb_jax.models.head.choose_readout`. If it is not given for such a head, only the paper
        protocol, which has a rule, can score.
      tokenizer: Folder or hub id of the tokenizer, if the model has none.
      quantize: "int8", "int8-weights" or "fp8": store the layers' matrices in eight bits; see
        :mod:`prb_jax.models.quantization`.
      attention: "auto" chooses for the machine, in bfloat16 a kernel on TPUs and GPUs; "xla" is the XLA program. See
        :func:`prb_jax.models.attention.choice.choose_attention`.
      reference: Language model from which ``model``, a policy, was trained by DPO. The result is a
        :class:`prb_jax.scoring.implicit.ImplicitRewards`: beta * (log p_policy - log p_reference), summed over the
        tokens of a response including the end of turn.
      beta: Factor of implicit rewards.
      reference_free: If True, implicit rewards use no reference: beta * log p_policy.
      logprobs: How `reference_free` combines log-probabilities of tokens: "sum"; "average", RewardBench's default; or
        "norm", the negative Euclidean norm.

    Raises:
      CheckpointError: The checkpoint cannot be used; the message names file, tensor or field.
      MeshError: The mesh does not fit the devices or the model.
    """
    return load_by_name(model, from_flat(LoadOptions, locals()))
