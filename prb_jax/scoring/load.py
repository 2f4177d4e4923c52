"""Load a model by name: a reward model, a fitted method of personalisation, or a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, overload

from jax.sharding import Mesh

from prb_jax.personal.folder import is_personalised
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_model
from prb_jax.scoring.load_opened import load_opened
from prb_jax.scoring.plain import BaselineName, PlainScorer, baseline_scorer
from prb_jax.scoring.reward_model import RewardModel

if TYPE_CHECKING:
    from prb_jax.personal.model import PersonalisedModel


@overload
def load(model: BaselineName) -> PlainScorer: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def load(
    model: str | Path,
    *,
    mesh: str | Mesh | None = ...,
    dtype: str | None = ...,
    revision: str | None = ...,
    chat_template: str | None = ...,
    readout: str | None = ...,
    tokenizer: str | Path | None = ...,
    quantize: str | None = ...,
    attention: str = ...,
) -> RewardModel: ...
def load(
    model: str | Path,
    *,
    mesh: str | Mesh | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    chat_template: str | None = None,
    readout: str | None = None,
    tokenizer: str | Path | None = None,
    quantize: str | None = None,
    attention: str = "auto",
) -> RewardModel | PlainScorer | PersonalisedModel:
    """Load a reward model from a Hugging Face folder or hub id, or a fitted method of personalisation.

    Args:
      model: folder with ``config.json``, safetensors and tokenizer files; or a hub id. The name of a baseline,
        as "baseline:length", gives a :class:`prb_jax.scoring.plain.PlainScorer`, which takes no options. A folder
        that `prb personalise` wrote for a method gives a
        :class:`prb_jax.personal.model.PersonalisedModel`, which takes ``mesh`` alone.
      mesh: sizes of the mesh axes, as in "fsdp=4,tensor=2" (-1: all devices that are left), or a mesh
        of :func:`prb_jax.sharding.make_mesh`; parameters split over all devices if not given.
      dtype: "float32" or "bfloat16", of weights and activations; that of the checkpoint if not given
        (bfloat16 for float16 ones).
      revision: branch, tag or commit of a hub id.
      chat_template: "plain", a Jinja file, or its text, instead of the tokenizer's own template.
      readout: a row of :data:`prb_jax.readouts.registry.REGISTRY`, if the files do not say which one, or
        ``vocabulary:ID`` for a logit of a language model; ``ROW:min`` (``product``, ``mean``, ``last``), how the
        steps of a process model become one reward; or which logit is the reward, for heads with several
        labels: see :func:`prb_jax.readouts.labels.choose_readout`; not named, such a head is scored by the paper
        protocol alone, which has a rule.
      tokenizer: folder or hub id of the tokenizer, if it is not with the model.
      quantize: "int8", "int8-weights" or "fp8": the layers' matrices in eight bits, as
        :mod:`prb_jax.models.quantization` describes them.
      attention: "auto", the machine's own choice; "blockwise", the XLA program; "kernel", cuDNN on GPUs and
        the splash kernel on TPUs, or an error; or "paged", on TPUs packed streams and a kernel that reads pages: see
        :func:`prb_jax.models.attention.choice.choose_attention`.

    Raises:
      CheckpointError: what is there cannot be used as it is; the message names file, tensor or field.
      MeshError: the mesh does not fit the devices or the model.
    """
    options = LoadOptions(
        mesh=mesh,
        dtype=dtype,
        revision=revision,
        chat_template=chat_template,
        readout=readout,
        tokenizer=tokenizer,
        quantize=quantize,
        attention=attention,
    )
    if str(model).startswith("baseline:"):
        return baseline_scorer(str(model), **options.given)
    if is_personalised(model):
        from prb_jax.scoring.embedder import load_personalised  # the methods take long to import

        return load_personalised(model, options)
    return load_opened(open_model(model, options))
