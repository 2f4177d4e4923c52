"""Checks that a checkpoint and a configuration describe the same model, tensor by tensor.

Every tensor of the files fills a leaf or is listed with the reason why it is left aside, and every
leaf is filled: nothing is initialised in silence. A reward model without its head would otherwise
score at random without a word.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.checkpoints.hf_map import LeafMap, ignored_reason, leaf_maps
from prb_jax.checkpoints.layout import module_name
from prb_jax.checkpoints.safetensors_header import FLOAT_DTYPES
from prb_jax.checkpoints.safetensors_reader import SliceReader, WeightIndex
from prb_jax.errors import CheckpointError, listed
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.layout import HEAD_KEY, OUTPUT_EMBEDDING_KEY

# Substrings of the names that other training frameworks give their reward heads.
_HEAD_NAMES = (
    "score",
    "v_head",
    "value_head",
    "regression",
    "rm_head",
    "reward",
    "classifier",
    "gating",
    "summary",
)
_ROWS_COMPARED = 1024


@dataclass(frozen=True, kw_only=True)
class Match:
    """How the tensors of a checkpoint are used.

    Attributes:
      leaves: the leaves, all of which the checkpoint fills.
      used: names of the tensors that fill them.
      ignored: the other tensors' names, each with the reason.
    """

    leaves: tuple[LeafMap, ...]
    used: tuple[str, ...]
    ignored: tuple[tuple[str, str], ...]


def match_tensors(index: WeightIndex, config: DecoderConfig, *, head: bool = True) -> Match:
    """Pair the tensors of a folder with the leaves of the parameter tree.

    Args:
      index: of the folder.
      config: the model.
      head: whether the score head is read; if not, a stored one is left aside.

    Raises:
      CheckpointError: the score head is missing or has another width than ``num_labels``; a tensor is
        missing, has no place in this architecture, has another shape, or is not floating-point.
    """
    leaves = tuple(leaf for leaf in leaf_maps(config) if head or not leaf.is_head)

    def reason(name: str) -> str | None:
        if not head and name == HEAD_KEY:
            return "replaced by a new head"
        return ignored_reason(name, config.layout)

    def missing_head(missing: Sequence[str], extra: Sequence[str]) -> None:
        if HEAD_KEY in missing:
            raise _missing_head(index, extra)

    return match_leaves(
        index,
        leaves,
        model_type=config.model_type,
        ignored=reason,
        explain=missing_head,
        hint=lambda key, shape: _labels_hint(key, shape, config),
    )


def match_leaves(
    index: WeightIndex,
    leaves: Sequence[LeafMap],
    *,
    model_type: str,
    ignored: Callable[[str], str | None],
    explain: Callable[[Sequence[str], Sequence[str]], None] = lambda missing, extra: None,
    hint: Callable[[str, tuple[int, ...]], str] = lambda key, shape: "",
) -> Match:
    """Pair the tensors of a folder with any table of leaves.

    Args:
      index: of the folder.
      leaves: all to be filled.
      model_type: for messages.
      ignored: why a tensor that fills no leaf may be left aside; None if it may not.
      explain: may raise an error of its own for missing and superfluous tensors.
      hint: what is added to the message on a tensor of another shape.

    Raises:
      CheckpointError: as :func:`match_tensors`.
    """
    # A tensor may fill several leaves, as a fused matrix does.
    wanted = [(key, leaf) for leaf in leaves for key in leaf.file_keys]
    expected = dict.fromkeys(key for key, _ in wanted)
    others = [name for name in index.tensors if name not in expected]
    aside = {name: reason for name in others if (reason := ignored(name)) is not None}
    extra = [name for name in others if name not in aside]
    missing = [key for key in expected if key not in index.tensors]
    explain(missing, extra)
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"{len(missing)} missing: {_shown(missing)}")
        if extra:
            parts.append(f"{len(extra)} that {model_type} has no place for: {_shown(extra)}")
        raise CheckpointError(
            f"{index.folder}: the tensors are not those of config.json: {'; '.join(parts)}; get weights and "
            "config.json of one model, or, if these are its head, name their row of the table of reward models with "
            "--readout"
        )
    for key, leaf in wanted:
        _check_tensor(index, key, leaf, hint)
    return Match(leaves=tuple(leaves), used=tuple(expected), ignored=tuple(sorted(aside.items())))


def check_tied_embeddings(index: WeightIndex, config: DecoderConfig, *, reader: SliceReader) -> None:
    """Check that a stored output embedding equals the input embedding it is said to be tied to.

    Raises:
      CheckpointError: ``tie_word_embeddings`` is set and the two tensors differ, so that one of them,
        or the configuration, belongs to another model.
    """
    if not config.tie_word_embeddings or OUTPUT_EMBEDDING_KEY not in index.tensors:
        return
    embedding = f"{module_name(config.layout, 'embed')}.weight"
    first, second = index.tensors[embedding], index.tensors[OUTPUT_EMBEDDING_KEY]
    equal = first.shape == second.shape and first.dtype == second.dtype
    rows, columns = first.shape
    for row in range(0, rows if equal else 0, _ROWS_COMPARED):
        region = (slice(row, min(row + _ROWS_COMPARED, rows)), slice(0, columns))
        blocks = [
            np.empty((region[0].stop - row, columns), FLOAT_DTYPES[tensor.dtype])
            for tensor in (first, second)
        ]
        for block, tensor in zip(blocks, (first, second), strict=True):
            reader.read_into(block, tensor.name, region)
        if blocks[0].tobytes() != blocks[1].tobytes():
            equal = False
            break
    if not equal:
        raise CheckpointError(
            f"{index.folder}: config.json says that '{OUTPUT_EMBEDDING_KEY}' is tied to '{embedding}', "
            "but the two stored tensors differ"
        )


def _missing_head(index: WeightIndex, extra: Sequence[str]) -> CheckpointError:
    start = f"{index.folder}: the score head '{HEAD_KEY}' is missing and would have to be made up at random"
    heads = [name for name in extra if any(part in name for part in _HEAD_NAMES)]
    if heads:
        return CheckpointError(
            f"{start}. The file holds a head of another kind, {_shown(heads)}: if you know which, name its row of the "
            "table of reward models with --readout"
        )
    side = sorted(path.name for path in index.folder.glob("*value_head*"))
    if side:
        return CheckpointError(
            f"{start}. The side file {_shown(side)} does not hold what it should, 'v_head.summary.weight'"
        )
    if OUTPUT_EMBEDDING_KEY in index.tensors:
        return CheckpointError(
            f"{start}. The tensors ('{OUTPUT_EMBEDDING_KEY}') are those of a causal language model, "
            "not of a reward model"
        )
    return CheckpointError(
        f"{start}. Expected a checkpoint of a *ForSequenceClassification class: get the whole one, or train a head "
        "with `prb train ... init_head=true`"
    )


def _check_tensor(
    index: WeightIndex, key: str, leaf: LeafMap, hint: Callable[[str, tuple[int, ...]], str]
) -> None:
    tensor = index.tensors[key]
    if tensor.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{tensor.path}: tensor '{key}': expected floating-point weights, found {tensor.dtype} "
            "(quantised weights are not supported)"
        )
    if tensor.shape != leaf.file_shape:
        raise CheckpointError(
            f"{tensor.path}: tensor '{key}': expected shape {list(leaf.file_shape)}, "
            f"found {list(tensor.shape)}{hint(key, tensor.shape)}"
        )


def _labels_hint(key: str, shape: tuple[int, ...], config: DecoderConfig) -> str:
    if key != HEAD_KEY or len(shape) != 2 or shape[1] != config.hidden_size:
        return ""
    stated = "num_labels" in config.original or config.original.get("id2label") is not None
    says = "says" if stated else "gives no num_labels, which means"
    return (
        f": config.json {says} {config.num_labels} labels; "
        f'if the head is right, set "num_labels": {shape[0]} there'
    )


def _shown(names: Sequence[str]) -> str:
    return listed([repr(name) for name in names])
