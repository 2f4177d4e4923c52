"""Load what is to be evaluated: a reward model, a fitted method of personalisation, a baseline, or a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, overload

from prb_jax.checkpoints.locate import describe, locate
from prb_jax.data.comparison import Comparison
from prb_jax.data.files import file_digest
from prb_jax.errors import RunError
from prb_jax.personal.folder import PERSONALISED, fitted_methods, holds_states, is_personalised
from prb_jax.plugins import get_plugin
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.remote.class_server import is_class_server, open_class_server
from prb_jax.remote.score_server import is_url, open_remote
from prb_jax.scoring.inputs import Data, read_inputs
from prb_jax.scoring.scorer import (
    AdaptsToUsers,
    BaselineName,
    PlainScorer,
    ScoreFunction,
    Scorer,
    baseline_scorer,
    file_scorer,
    function_scorer,
    is_file_function,
    refuse_options,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from prb_jax.personal.model import PersonalisedModel
    from prb_jax.scoring.reward_model import RewardModel

PLUGIN: Final = "plugin:"
"""Before the name of an entry point prb_jax.rewards, where a model is named."""

Model = Scorer | ScoreFunction | str | Path


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
        as "baseline:length", or of a function of a comparison, as "FILE.py:NAME" or "plugin:NAME" (see
        `docs/plugins.md`), gives a :class:`prb_jax.scoring.scorer.PlainScorer`, which takes no options. A folder
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
        labels: see :func:`prb_jax.readouts.heads.choose_readout`; not named, such a head is scored by the paper
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
    return load_by_name(
        model,
        LoadOptions(
            mesh=mesh,
            dtype=dtype,
            revision=revision,
            chat_template=chat_template,
            readout=readout,
            tokenizer=tokenizer,
            quantize=quantize,
            attention=attention,
        ),
    )


def load_by_name(model: str | Path, options: LoadOptions) -> RewardModel | PlainScorer | PersonalisedModel:
    """As :func:`load`, with all choices in one object."""
    if has_no_weights(model):
        if options.quantize is not None:
            raise RunError(f"quantize: {model} has no weights; leave it out")
        if is_file_function(model):
            return file_scorer(str(model), **options.given)
        if str(model).startswith(PLUGIN):
            refuse_options(str(model), **options.given)
            plugin = get_plugin("rewards", str(model).removeprefix(PLUGIN))
            return function_scorer(plugin.value, name=str(model), code=plugin.origin)
        return baseline_scorer(str(model), **options.given)
    if is_personalised(model):
        from prb_jax.scoring.embedder import load_personalised  # the methods take long to import

        return load_personalised(model, options)
    _refuse_study(model)
    from prb_jax.readouts.open_model import open_model  # a baseline starts no JAX
    from prb_jax.scoring.reward_model import load_reward_model

    return load_reward_model(open_model(model, options))


def _refuse_study(model: str | Path) -> None:
    if methods := fitted_methods(model):
        raise RunError(
            f"{model}: is a study of several methods: name one of them: {', '.join(map(str, methods))}"
        )


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
      options: for a model by name alone.
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
    if is_class_server(model):
        given = dict(options.given)
        own = {key: given.pop(key) for key in ("tokenizer", "revision", "chat_template") if key in given}
        if given:
            raise RunError(f"{', '.join(given)}: decided by the server {model}: leave out here")
        return open_class_server(str(model), **own)
    if is_url(model):
        if options.given:
            raise RunError(f"{', '.join(options.given)}: decided by the server {model}: leave out here")
        return open_remote(str(model))
    if isinstance(model, str | Path):
        return cast(Scorer, load_by_name(model, options))
    if options.given:
        raise RunError(f"{', '.join(options.given)}: decided where the model was loaded; leave out here")
    if hasattr(model, "stream"):
        return cast(Scorer, model)
    if not callable(model):
        raise RunError(f"model: expected a model, a name or a function, found {type(model).__name__}")
    scorer = function_scorer(model, name=name)
    if recorded and name is None and "<lambda>" in scorer.name:
        raise RunError(f"{scorer.name}: a lambda has no name that tells it from others: give name=...")
    return scorer


def with_history(
    scorers: Mapping[str, Scorer], history: Sequence[Comparison] | Path | None
) -> dict[str, Scorer]:
    """Return the scorers by name; the fitted methods of personalisation among them know the history, if there is one.

    Args:
      scorers: by name.
      history: comparisons, or a folder of states of users: :func:`read_history`.

    Raises:
      RunError: a history, and no model that adapts to users.
    """
    if history is None:
        return dict(scorers)
    adapted = {
        name: scorer.with_states(history) if isinstance(history, Path) else scorer.with_history(history)
        for name, scorer in scorers.items()
        if isinstance(scorer, AdaptsToUsers)
    }
    if not adapted:
        raise RunError(
            f"history: {', '.join(scorers)} does not adapt to users; expected a folder of a fitted method, as "
            "`prb personalise` writes it"
        )
    return {**scorers, **adapted}


def model_contents(model: Model, revision: str | None) -> Any:
    """Return the digests of the files of a model that is not loaded yet, or the name of a baseline."""
    if is_file_function(model):
        return file_digest(Path(str(model).rpartition(":")[0]))
    if not isinstance(model, str | Path) or has_no_weights(model) or is_url(model):
        return model if isinstance(model, str) else None
    if is_personalised(model):
        return file_digest(Path(model).expanduser() / PERSONALISED)
    _refuse_study(model)
    return describe(locate(model, revision=revision))


def has_no_weights(model: str | Path) -> bool:
    """Tell whether a name is that of a baseline, or of a function as FILE.py:NAME or plugin:NAME."""
    named = isinstance(model, str) and model.startswith(("baseline:", PLUGIN))
    return named or is_file_function(model)


def read_history(history: Data | None) -> Sequence[Comparison] | Path | None:
    """Return the comparisons that a history names, or the folder of saved states that it is.

    Raises:
      DataError: it cannot be used.
      RunError: a folder of states beside other data.
    """
    if history is None:
        return None
    parts = list(history) if isinstance(history, list | tuple) else [history]
    folders = [
        Path(part).expanduser() for part in parts if isinstance(part, str | Path) and holds_states(part)
    ]
    if not folders:
        return read_inputs(history).comparisons
    if len(parts) > 1:
        raise RunError(f"history: {folders[0]} holds states of people: give it alone")
    return folders[0]
