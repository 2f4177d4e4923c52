"""Load a scorer: a reward model, a fitted method, a baseline, a function, or a server that scores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, overload

from prb_jax.errors import CheckpointError, RunError, quote
from prb_jax.models import Together
from prb_jax.models.checkpoints.locate import describe, locate
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.personal import PERSONALISED, fitted_methods, holds_states, is_personalised
from prb_jax.records.comparison import Comparison
from prb_jax.records.files import file_digest
from prb_jax.records.intake import MODEL_FIRST
from prb_jax.records.options import from_flat, refuse_given
from prb_jax.scoring import READS_TEXTS
from prb_jax.scoring.inputs import Data, read_inputs
from prb_jax.scoring.remote import is_class_server, is_url
from prb_jax.scoring.scorer import OwnScorer, ScoreFunction, Scorer, ScoresTokens, StreamsScores
from prb_jax.seams import get, is_python_value

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from numpy.typing import DTypeLike

    from prb_jax.scoring.baselines import BaselineName
    from prb_jax.scoring.implicit import ImplicitRewards
    from prb_jax.scoring.personalised import PersonalisedModel
    from prb_jax.scoring.plain import PlainScorer
    from prb_jax.scoring.reward_model import RewardModel

Model = Scorer | StreamsScores | ScoresTokens | ScoreFunction | str | Path


@dataclass(frozen=True)
class _Kind:
    """A kind of scorer other than a reward model, selected by the form of its name."""

    named: Callable[[Any], bool]  # returns True for a name of this kind
    opener: str  # entry of "scorers" in `prb_jax.seams`; makes a scorer from the name and options
    decided: str = READS_TEXTS  # reason why other options have no effect
    takes: tuple[str, ...] = ()  # options that have an effect
    contents: Callable[[str], Any] = str  # JSON-ready fingerprint of the source of scores, without loading it


def _begins_with(start: str) -> Callable[[Any], bool]:
    return lambda model: isinstance(model, str) and model.startswith(start)


_SERVED: Final = "decided by the server {}"
_OF_TOKENIZER: Final = ("tokenizer", "revision", "chat_template")
_WITHOUT_WEIGHTS: Final = (
    _Kind(_begins_with("baseline:"), "baseline"),
    _Kind(_begins_with("plugin:"), "plug-in"),
    _Kind(
        is_python_value,
        "file",
        contents=lambda name: file_digest(Path(name.rpartition(":")[0])),
    ),
)
_KINDS: Final = (
    *_WITHOUT_WEIGHTS,
    _Kind(is_class_server, "class server", _SERVED, _OF_TOKENIZER),
    _Kind(is_url, "server", _SERVED),
    _Kind(
        is_personalised,
        "fitted method",
        "decided where {} was fitted",
        takes=("mesh",),
        contents=lambda name: file_digest(Path(name).expanduser() / PERSONALISED),
    ),
)
"""The first kind that matches a name opens it, and imports its dependencies only then."""


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
        :func:`prb_jax.platform.sharding.make_mesh`. If not given, parameters are split over all devices.
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
        :func:`prb_jax.models.readouts.rules.choose_readout`. If it is not given for such a head, only the paper
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
    return _load_by_name(model, from_flat(LoadOptions, locals()))


def _load_by_name(model: str | Path, options: LoadOptions) -> Any:
    if not isinstance(model, str | Path):
        raise CheckpointError(f"model: expected a folder or a hub id, found {quote(model)}")
    if not isinstance(options.tokenizer, str | Path | None):
        raise RunError(
            f"tokenizer: expected a folder or hub id beside the name of a model, found "
            f"{type(options.tokenizer).__name__}"
        )
    if (kind := _kind_of(model)) is None and options.is_implicit:
        return get("scorers", "implicit rewards").value(model, options)
    if kind is None:
        from prb_jax.models.readouts.open_model import open_model  # baselines do not start JAX
        from prb_jax.scoring.reward_model import load_reward_model

        return load_reward_model(open_model(model, options))
    given = options.given
    taken = {option: given.pop(option) for option in kind.takes if option in given}
    refuse_given(given, kind.decided.format(model))
    return get("scorers", kind.opener).value(str(model), **taken)


def _kind_of(model: str | Path) -> _Kind | None:
    """Return the kind of a name; None for a reward model.

    Raises:
      RunError: The name is a study of several methods.
    """
    kind = next((kind for kind in _KINDS if kind.named(model)), None)
    if kind is None and (methods := fitted_methods(model)):
        raise RunError(
            f"{model}: is a study of several methods: name one of them: {', '.join(map(str, methods))}"
        )
    return kind


def open_scorer(
    model: Model,
    options: LoadOptions,
    *,
    name: str | None = None,
    recorded: bool = False,
    history: Sequence[Comparison] | Path | None = None,
) -> Scorer:
    """Return the scorer of a model; load it if it is a name.

    Args:
      model: Model, as in :func:`prb_jax.evaluate`.
      options: Options of loading, for a name or a `flax.nnx.Module`.
      name: Name of a function.
      recorded: True if a run folder will identify the scorer by its name.
      history: Comparisons or saved states for fitted methods: see :func:`with_history`.

    Raises:
      RunError: Options have no effect, or the object cannot score.
      CheckpointError, MeshError: The model cannot be loaded.
    """
    if history is not None:
        scorer = open_scorer(model, options, name=name, recorded=recorded)
        known_as = str(scorer.identity().get("name", "this model"))
        return with_history({known_as: scorer}, history)[known_as]
    if isinstance(model, str | Path):
        return _load_by_name(model, options)
    if is_module(model):
        return get("scorers", "module").value(model, options)
    refuse_given(options.given, "decided where the model was loaded")
    if isinstance(model, Scorer):
        return model
    if hasattr(model, "stream"):
        return OwnScorer(cast(StreamsScores, model))
    if not callable(model):
        raise RunError(
            f"model: expected a model, a name or a function, found {type(model).__name__}; {MODEL_FIRST}"
        )
    return get("scorers", "function").value(model, name=name, recorded=recorded)


def is_module(model: Any) -> bool:
    """Return True for a `flax.nnx.Module` or a subclass, without importing Flax."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and issubclass(model if isinstance(model, type) else type(model), nnx.Module)


def with_history(
    scorers: Mapping[str, Scorer], history: Sequence[Comparison] | Path | None
) -> dict[str, Scorer]:
    """Return the scorers by name, with the fitted methods among them adapted to the history, if there is one.

    Args:
      scorers: Scorers by name.
      history: Comparisons, or a folder of user states: see :func:`read_history`.

    Raises:
      RunError: There is a history and no scorer adapts to users.
    """
    if history is None:
        return dict(scorers)
    adapted = {name: scorer.with_history(history) for name, scorer in scorers.items() if scorer.adapts}
    if not adapted:
        raise RunError(
            f"history: {', '.join(scorers)} does not adapt to users; expected a folder of a fitted method, as "
            "`prb personalise` writes it"
        )
    return {**scorers, **adapted}


def model_contents(model: Model, loading: LoadOptions) -> Any:
    """Return a JSON-ready description of a named model's contents, without loading it; None for an object."""
    if not isinstance(model, str | Path):
        return None
    kind = _kind_of(model)
    if kind is not None:
        return kind.contents(str(model))
    described = describe(locate(model, revision=loading.revision, base=loading.base))
    if loading.reference is None:
        return described
    return described | {"reference": describe(locate(loading.reference))}


def has_no_weights(model: str | Path) -> bool:
    """Return True for the name of a baseline or a function (FILE.py:NAME, plugin:NAME)."""
    return any(kind.named(model) for kind in _WITHOUT_WEIGHTS)


def check_name(model: str | Path) -> None:
    """Raise an error for a name of no model, without loading anything."""
    if _kind_of(model) is None:
        locate(model)


def read_history(history: Data | None) -> Sequence[Comparison] | Path | None:
    """Return the comparisons of a history, or its folder of saved user states.

    Raises:
      DataError: The history cannot be used.
      RunError: A folder of states is combined with other data.
    """
    if history is None:
        return None
    parts = list(history) if isinstance(history, list | tuple) else [history]
    folders = [Path(part).expanduser() for part in parts if holds_states(part)]  # pyright: ignore[reportArgumentType]
    if not folders:
        return read_inputs(history).comparisons
    if len(parts) > 1:
        raise RunError(f"history: {folders[0]} contains user states, so it must be the only history")
    return folders[0]
