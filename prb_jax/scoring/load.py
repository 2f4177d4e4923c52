"""Load what is to be evaluated: a reward model, a fitted method, a baseline, a function, or a server that scores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, overload

from prb_jax.errors import RunError
from prb_jax.models import Together
from prb_jax.models.checkpoints.locate import describe, locate
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.personal import PERSONALISED, fitted_methods, holds_states, is_personalised
from prb_jax.records.comparison import Comparison
from prb_jax.records.files import file_digest
from prb_jax.records.options import from_flat, refuse_given
from prb_jax.scoring import READS_TEXTS
from prb_jax.scoring.inputs import Data, read_inputs
from prb_jax.scoring.remote import is_class_server, is_url
from prb_jax.scoring.scorer import OwnScorer, ScoreFunction, Scorer, ScoresTokens, StreamsScores
from prb_jax.seams import get, is_python_value

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from prb_jax.scoring.baselines import BaselineName
    from prb_jax.scoring.implicit import ImplicitRewards
    from prb_jax.scoring.personalised import PersonalisedModel
    from prb_jax.scoring.plain import PlainScorer
    from prb_jax.scoring.reward_model import RewardModel

Model = Scorer | StreamsScores | ScoresTokens | ScoreFunction | str | Path


@dataclass(frozen=True)
class _Kind:
    """What a name may stand for, beside a reward model."""

    named: Callable[[Any], bool]  # tells a name of this kind
    opener: str  # among the scorers of `prb_jax.seams`; makes a scorer of the name and options
    decided: str = READS_TEXTS  # who decides about the options that it does not take
    takes: tuple[str, ...] = ()  # the options that it takes
    contents: Callable[[str], Any] = str  # JSON-ready, what the scores come from, without opening it


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
"""The first one that knows a name opens it; what they need is imported only then."""


@overload
def load(model: BaselineName) -> PlainScorer: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def load(
    model: str | Path,
    *,
    mesh: str | Mesh | None = ...,
    dtype: str | None = ...,
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
    dtype: str | None = ...,
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
    dtype: str | None = None,
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
      model: folder with ``config.json``, safetensors and tokenizer files; folder of a PEFT adapter; or a hub id. The
        name of a baseline, as "baseline:length", or of a function of a comparison, as "FILE.py:NAME" or
        "plugin:NAME" (see `docs/plugins.md`), gives a :class:`prb_jax.scoring.plain.PlainScorer`, which takes no
        options. A folder that `prb personalise` wrote for a method gives a
        :class:`prb_jax.scoring.personalised.PersonalisedModel`, which takes ``mesh`` alone.
      mesh: sizes of the mesh axes, as in "fsdp=4,tensor=2" (-1: all devices that are left), or a mesh
        of :func:`prb_jax.platform.sharding.make_mesh`; parameters split over all devices if not given. Of a mesh with
        other axes, as another library makes it, the devices are taken.
      dtype: "float32" or "bfloat16", of weights and activations; that of the checkpoint if not given
        (bfloat16 for float16 ones).
      revision: branch, tag or commit of a hub id.
      base: base model of a PEFT adapter, if it is another one than the adapter's `base_model_name_or_path`.
      chat_template: "plain", a Jinja file, or its text, instead of the tokenizer's own template.
      readout: a row of :data:`prb_jax.models.readouts.registry.REGISTRY`, if the files do not say which one, or
        ``vocabulary:ID`` for a logit of a language model; ``ROW:min`` (``product``, ``mean``, ``last``), how the
        steps of a process model become one reward; ``steps:ID`` for two labels at every token of this id; or which
        logit is the reward, for heads with several labels: see
        :func:`prb_jax.models.readouts.rules.choose_readout`; not named, such a head is scored by the paper protocol
        alone, which has a rule.
      tokenizer: folder or hub id of the tokenizer, if it is not with the model.
      quantize: "int8", "int8-weights" or "fp8": the layers' matrices in eight bits, as
        :mod:`prb_jax.models.quantization` describes them.
      attention: "auto", the machine's own choice, in bfloat16 a kernel on TPUs and GPUs; or "xla", the XLA program: see
        :func:`prb_jax.models.attention.choice.choose_attention`.
      reference: the language model from which ``model``, a policy, was trained by DPO. The result is a
        :class:`prb_jax.scoring.implicit.ImplicitRewards`: beta * (log p_policy - log p_reference), summed over the
        tokens of a response, its end of turn included.
      beta: factor of implicit rewards.
      reference_free: implicit rewards without a reference: beta * log p_policy.
      logprobs: of `reference_free`: the log-probabilities of tokens as their "sum"; "average", RewardBench's default
        there; or "norm", their negative Euclidean norm.

    Raises:
      CheckpointError: what is there cannot be used as it is; the message names file, tensor or field.
      MeshError: the mesh does not fit the devices or the model.
    """
    return _load_by_name(model, from_flat(LoadOptions, locals()))


def _load_by_name(model: str | Path, options: LoadOptions) -> Any:
    if not isinstance(options.tokenizer, str | Path | None):
        raise RunError(
            f"tokenizer: expected a folder or hub id beside the name of a model, found "
            f"{type(options.tokenizer).__name__}"
        )
    if (kind := _kind_of(model)) is None and options.is_implicit:
        return get("scorers", "implicit rewards").value(model, options)
    if kind is None:
        from prb_jax.models.readouts.open_model import open_model  # a baseline starts no JAX
        from prb_jax.scoring.reward_model import load_reward_model

        return load_reward_model(open_model(model, options))
    given = options.given
    taken = {option: given.pop(option) for option in kind.takes if option in given}
    refuse_given(given, kind.decided.format(model))
    return get("scorers", kind.opener).value(str(model), **taken)


def _kind_of(model: str | Path) -> _Kind | None:
    """The kind of a name; None for a reward model.

    Raises:
      RunError: a study of several methods.
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
    """Return the scorer, loaded if it is given by name.

    Args:
      model: what :func:`prb_jax.evaluate` takes.
      options: for a model by name, or a `flax.nnx.Module`.
      name: of a function.
      recorded: a run folder will tell this scorer from others.
      history: what a fitted method of personalisation knows of the users: see :func:`with_history`.

    Raises:
      RunError: options without effect, or a thing that cannot score.
      CheckpointError, MeshError: the model cannot be loaded.
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
        raise RunError(f"model: expected a model, a name or a function, found {type(model).__name__}")
    return get("scorers", "function").value(model, name=name, recorded=recorded)


def is_module(model: Any) -> bool:
    """Tell a `flax.nnx.Module`, or a class of them, without importing Flax."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and issubclass(model if isinstance(model, type) else type(model), nnx.Module)


def with_history(
    scorers: Mapping[str, Scorer], history: Sequence[Comparison] | Path | None
) -> dict[str, Scorer]:
    """Return the scorers by name; the fitted methods of personalisation among them know the history, if there is one.

    Args:
      history: comparisons, or a folder of states of users: :func:`read_history`.

    Raises:
      RunError: a history, and no model that adapts to users.
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
    """Return what the scores of a model by name come from, JSON-ready and without loading it; None for an object."""
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
    """Tell whether a name is that of a baseline, or of a function as FILE.py:NAME or plugin:NAME."""
    return any(kind.named(model) for kind in _WITHOUT_WEIGHTS)


def check_name(model: str | Path) -> None:
    """Raise the error of a name that stands for nothing, without opening what it stands for."""
    if _kind_of(model) is None:
        locate(model)


def read_history(history: Data | None) -> Sequence[Comparison] | Path | None:
    """Return the comparisons that a history names, or the folder of saved states that it is.

    Raises:
      DataError: it cannot be used.
      RunError: a folder of states beside other data.
    """
    if history is None:
        return None
    parts = list(history) if isinstance(history, list | tuple) else [history]
    folders = [Path(part).expanduser() for part in parts if holds_states(part)]  # pyright: ignore[reportArgumentType]
    if not folders:
        return read_inputs(history).comparisons
    if len(parts) > 1:
        raise RunError(f"history: {folders[0]} holds states of people: give it alone")
    return folders[0]
