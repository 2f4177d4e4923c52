"""A user's `flax.nnx.Module` as a reward model: properties, identity and program.

The module provides one method, ``score_tokens(tokens int32 [B, T], lengths int32 [B]) -> float32 [B]``, for sequences
padded on the right. It runs in evaluation mode: dropout is off, and batch statistics are fixed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from prb_jax.errors import PrbWarning, RunError, listed, quote, short_repr
from prb_jax.models.checkpoints.locate import describe, fingerprint, locate
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.sharding import as_mesh, batch_sharding, on_any_mesh, replicated
from prb_jax.records.options import refuse_given
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.trees.sequences import SequenceBatch

if TYPE_CHECKING:
    from prb_jax.models.readouts.score_pairs import PairFn

METHOD: Final = "score_tokens"
_SIGNATURE: Final = f"{METHOD}(tokens int32 [B, T], lengths int32 [B]) -> float32 [B]"

_MOST: Final = 2**31 - 1  # token ids and lengths are int32: the default limit of a module


@dataclass(frozen=True, kw_only=True)
class ModuleConfig:
    """Properties of a module for reading and batching, named as in ``config.json``."""

    architectures: tuple[str]  # class of the module
    vocab_size: int
    max_position_embeddings: int
    hidden_size: int | None  # determines the default learning rate
    flops_per_token: float  # approximation: each parameter is used once
    token_bytes: int  # bytes a backward pass keeps per token: about the float32 output of every matrix
    model_type: str = "module"
    num_labels: int = 1
    pad_token_id: int = -1  # not an id: the module chooses its read position, so no token is padding
    head: None = None
    original: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UserModule:
    """A split module with its tokenizer. Build with :func:`open_module`."""

    config: ModuleConfig
    tokenizer: ChatTokenizer
    mesh: Mesh
    graphdef: Any  # static part, in evaluation mode
    state: Any  # `nnx.State` with every variable
    source: Mapping[str, Any]  # digests of state and tokenizer, JSON-ready

    __repr__ = short_repr

    @property
    def name(self) -> str:
        """Name of the class and its Python module."""
        return self.config.architectures[0]

    @cached_property
    def shardings(self) -> Any:
        """Sharding of each variable: its present sharding if it uses the mesh's devices, otherwise replicated."""
        return jax.tree.map(lambda leaf: _sharding(leaf, self.mesh), self.state)

    @property
    def dtype(self) -> str:
        """Dtypes of the parameters."""
        kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.filter_state(self.state, nnx.Param))}
        return " ".join(sorted(kinds))


def open_module(module: Any, options: LoadOptions) -> UserModule:
    """Check a module and split it; the module itself is not changed.

    Args:
      module: Instance of `nnx.Module` with the method ``score_tokens``. If it has an attribute ``vocab_size`` or
        ``max_position_embeddings``, larger ids and longer sequences are refused.
      options: ``tokenizer`` (a folder, hub id or transformers tokenizer), ``mesh`` and ``chat_template``.

    Raises:
      RunError: The object is not a module with this method, the tokenizer is missing, or an option is set that the
        module decides.
      CheckpointError: The tokenizer cannot be used.
      MeshError: The mesh does not fit the devices.
    """
    kind = module if isinstance(module, type) else type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(module, type) or not isinstance(module, nnx.Module):
        found = f"the class {name}" if isinstance(module, type) else name
        raise RunError(f"model: expected an instance of flax.nnx.Module, found {found}")
    if not callable(getattr(module, METHOD, None)):
        raise RunError(f"model {name}: expected a method {_SIGNATURE}, found none")
    given = options.given
    chosen: Any = {option: given.pop(option, None) for option in ("tokenizer", "mesh", "chat_template")}
    refuse_given(given, f"decided by the module {name}")
    if chosen["tokenizer"] is None:
        raise RunError(
            f"tokenizer: the module {name} needs one: expected a folder, a hub id or a transformers tokenizer, found "
            "none"
        )
    own = nnx.merge(*nnx.split(module))
    own.eval()
    graphdef, state = nnx.split(own)
    state = jax.tree.map(jnp.asarray, state)
    tokenizer, described = _open_tokenizer(chosen["tokenizer"], chosen["chat_template"])
    parameters = jax.tree.leaves(nnx.filter_state(state, nnx.Param))
    config = ModuleConfig(
        architectures=(name,),
        vocab_size=_named_number(module, "vocab_size", name) or _MOST,
        max_position_embeddings=_named_number(module, "max_position_embeddings", name) or _MOST,
        hidden_size=_named_number(module, "hidden_size", name),
        flops_per_token=2.0 * max(sum(leaf.size for leaf in parameters), 1),
        token_bytes=4 * max(sum(leaf.size // leaf.shape[-2] for leaf in parameters if leaf.ndim > 1), 1),
    )
    rows = max((size for leaf in parameters for size in leaf.shape), default=0)
    if config.vocab_size == _MOST and tokenizer.largest_plain_id >= rows:
        warnings.warn(
            f"model {name}: the tokenizer has ids up to {tokenizer.largest_plain_id}, and no parameter has more than "
            f"{rows} rows: an id without an embedding may be read as another one; an attribute vocab_size of the "
            "module says which ids it can read",
            PrbWarning,
            stacklevel=2,
        )
    code = "not recorded: a change of the module's code is not seen"
    mesh = chosen["mesh"]
    return UserModule(
        config=config,
        tokenizer=tokenizer,
        mesh=as_mesh(mesh),
        graphdef=graphdef,
        state=state,
        source={"state": state_digest(own), "code": code, "tokenizer": described},
    )


def _named_number(module: Any, attribute: str, name: str) -> int | None:
    value = getattr(module, attribute, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise RunError(f"model {name}: {attribute}: expected a positive number, found {quote(value)}")
    return int(value)


def _open_tokenizer(given: Any, chat_template: str | None) -> tuple[ChatTokenizer, dict[str, Any]]:
    """Return the tokenizer and the digests of its files."""
    if isinstance(given, str | Path):
        folder = locate(given)
        return load_tokenizer(folder.path, chat_template=chat_template), describe(folder)
    from transformers import PreTrainedTokenizerBase

    if not isinstance(given, PreTrainedTokenizerBase):
        raise RunError(
            "tokenizer: expected a folder, a hub id or a transformers tokenizer, found "
            f"{type(given).__module__}.{type(given).__qualname__}"
        )
    chat = load_tokenizer(given, chat_template=chat_template)
    with TemporaryDirectory(prefix="prb-") as folder:
        chat.tokenizer.save_pretrained(folder)
        return chat, {"revision": None, "files": fingerprint(Path(folder))}


def state_digest(module: Any) -> str:
    """Return "sha256:..." over every variable of a module (path, kind, shape, dtype, bytes) and over its plain
    attributes, e.g. the number of heads or an activation."""
    digest = sha256()
    for path, node in sorted(nnx.iter_graph(module), key=lambda item: list(map(str, item[0]))):
        place = "/".join(map(str, path))
        if isinstance(node, nnx.Variable):
            for value in map(jnp.asarray, jax.tree.leaves(node.get_value())):
                is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
                host = np.ascontiguousarray(jax.random.key_data(value) if is_key else value)
                digest.update(f"{place} {type(node).__name__} {host.shape} {value.dtype}\n".encode())
                digest.update(host.tobytes())
        elif (text := _plain_text(node)) is not None:
            digest.update(f"{place} {text}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def _plain_text(value: Any) -> str | None:
    """Return a text for numbers, strings, tuples of them and functions (their names); None for other objects."""
    if isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple):
        return repr([_plain_text(one) for one in value])
    name = getattr(value, "__qualname__", None)
    return None if name is None else f"{getattr(value, '__module__', None)}.{name}"


def _sharding(leaf: jax.Array, mesh: Mesh) -> NamedSharding:
    own = leaf.sharding
    if not isinstance(own, NamedSharding) or set(own.mesh.axis_types) != {AxisType.Auto}:
        return replicated(mesh)
    theirs, ours = (list(np.asarray(one.devices).flat) for one in (own.mesh, mesh))
    return own if theirs == ours else replicated(mesh)


def score_sequences(graphdef: Any, state: Any, batch: SequenceBatch) -> jax.Array:
    """Return the rewards float32 [S] of the sequences of a batch; rewards of empty rows are meaningless.

    Raises:
      RunError: ``score_tokens`` returns something else, or modifies the module.
    """
    module = nnx.merge(graphdef, state)
    tokens, lengths = jnp.asarray(batch.tokens), jnp.maximum(jnp.asarray(batch.lengths), 1)
    before = {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(module))}
    rewards = getattr(module, METHOD)(tokens, lengths)
    name = f"{type(module).__module__}.{type(module).__qualname__}.{METHOD}"
    kind = getattr(rewards, "dtype", None), getattr(rewards, "shape", None)
    if not isinstance(rewards, jax.Array) or kind != (jnp.float32, lengths.shape):
        found = (
            f"{kind[0]} {list(kind[1] or ())}" if isinstance(rewards, jax.Array) else type(rewards).__name__
        )
        raise RunError(
            f"{name}(tokens int32 {list(tokens.shape)}, lengths int32 {list(lengths.shape)}): expected float32 "
            f"{list(lengths.shape)}, found {found}"
        )
    after = {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(module))}
    if changed := ["/".join(map(str, path)) for path in before if after.get(path) is not before[path]]:
        raise RunError(
            f"{name}: expected rewards that depend only on the parameters and the tokens, found a change of "
            f"{listed(changed)}: random draws and running averages must be off in evaluation mode"
        )
    return rewards


def make_module_fn(module: UserModule) -> PairFn:
    """Return the jitted scorer of (state, batch): rewards float32, equal on every device; [B, K] for a batch with
    places, else [S]."""

    def score(state: Any, batch: SequenceBatch) -> jax.Array:
        rewards = score_sequences(module.graphdef, state, batch)
        return rewards if batch.places is None else rewards[batch.places]

    mesh = module.mesh
    shardings = (module.shardings, batch_sharding(mesh, 1))
    return jax.jit(on_any_mesh(score, mesh), in_shardings=shardings, out_shardings=replicated(mesh))
