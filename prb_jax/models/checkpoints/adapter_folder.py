"""A PEFT adapter (LoRA) as a model folder, with updates added to the base's matrices during reading.

`W + scale * B A` is computed in float32 for each slice of W that a shard reads. An adapted model can therefore be
sharded, quantised and inspected like any other. Names and rules are as in PEFT (https://github.com/huggingface/peft).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.errors import CheckpointError, listed, quote
from prb_jax.models.checkpoints.adapter_config import AdapterConfig, read_adapter_config
from prb_jax.models.checkpoints.locate import ADAPTER, ADAPTER_CONFIG, BASE, locate
from prb_jax.models.checkpoints.weight_file import FLOAT_DTYPES, TensorInfo, read_tensors
from prb_jax.models.checkpoints.weight_index import (
    ExpertFactors,
    SliceReader,
    Update,
    WeightIndex,
    index_folder,
)
from prb_jax.models.config.experts import ExpertNames
from prb_jax.models.config.families import FAMILIES
from prb_jax.models.head import EMBEDDING_KEY, HEAD_KEY, OUTPUT_EMBEDDING_KEY
from prb_jax.records.reading import read_object

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_FACTORS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
_OF_MIXTURE = re.compile(r".*\.(experts\..*|(mlp|block_sparse_moe)\.gate|mlp\.router)")
_NOT_LINKED = ("config.json", "model", "pytorch_model", "adapter_", "training_args")
_TOKENIZER = re.compile(
    r"(tokenizer|vocab|merges|special_tokens_map|added_tokens|chat_template|spiece|sentencepiece).*|.*\.model"
)


def adapted_folder(adapter: Path, base: str | Path | None) -> Path:
    """Return a temporary folder of this process that represents an adapter on its base model.

    The folder contains links to both and to their files except weights, the adapter's tokenizer (or else the base's),
    and the base's `config.json`, with a score head if the adapter has one. :func:`index_adapted` reads its weights.

    Args:
      adapter: Folder with `adapter_config.json`.
      base: Folder or hub id; by default the adapter's `base_model_name_or_path`.

    Raises:
      CheckpointError: A field or a tensor is unsupported, or the base cannot be found.
    """
    config, revision = read_adapter_config(adapter), None
    if base is None and config.base is None:
        raise CheckpointError(
            f"{config.where}: has no base_model_name_or_path; name the base model with --base"
        )
    if base is None and not Path(str(config.base)).expanduser().is_dir():
        revision = config.revision
    below, seen = Path(str(base or config.base)).expanduser(), {adapter.resolve()}
    while (below / ADAPTER_CONFIG).is_file():
        if below.resolve() in seen:
            raise CheckpointError(
                f"{config.where}: adapters name each other as their base: expected a whole model"
            )
        seen.add(below.resolve())
        below = Path(read_adapter_config(below).base or "").expanduser()
    try:
        below = locate(str(base or config.base), revision=revision).path
    except CheckpointError as error:
        raise CheckpointError(
            f"{config.where}: the base model of this adapter cannot be opened: {error}; name another with --base"
        ) from error
    view = Path(tempfile.mkdtemp(prefix="adapter-", dir=_views()))
    own = any((adapter / name).exists() for name in ("tokenizer_config.json", "tokenizer.json"))
    for source, tokenizer in ((below, not own), (adapter, own)):
        for path in source.iterdir():
            named = _TOKENIZER.fullmatch(path.name) is not None
            if path.is_file() and (tokenizer if named else not path.name.startswith(_NOT_LINKED)):
                (view / path.name).unlink(missing_ok=True)
                (view / path.name).symlink_to(path.absolute())
    for name, folder in ((ADAPTER, adapter), (BASE, below)):
        (view / name).symlink_to(folder.absolute(), target_is_directory=True)
    _opened[view] = read = _Adapter(config, *_tensors(adapter, config))
    described = _base_config(below, read.saved, ties=config.ensure_weight_tying)
    (view / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return view


@dataclass(frozen=True)
class _Adapter:
    """Configuration and tensor headers of an adapter."""

    config: AdapterConfig
    factors: Mapping[str, Mapping[str, TensorInfo]]  # factor tensors by module and part
    saved: Mapping[str, TensorInfo]  # complete tensors by their name in the base


_opened: dict[Path, _Adapter] = {}  # keys: folders from `adapted_folder`
_kept: list[tempfile.TemporaryDirectory[str]] = []


def _views() -> str:
    """Return the directory for the folders of this process, removed when the process ends."""
    if not _kept:
        _kept.append(tempfile.TemporaryDirectory(prefix="prb-", ignore_cleanup_errors=True))
    return _kept[0].name


def _base_config(base: Path, saved: Mapping[str, TensorInfo], *, ties: bool) -> dict[str, Any]:
    """Return the base's `config.json` with the head and the vocabulary of the adapter."""
    raw: dict[str, Any] = read_object(base / "config.json", error=CheckpointError, finite=False)
    for name in saved.keys() & {EMBEDDING_KEY, HEAD_KEY}:
        if len(saved[name].shape) != 2:
            raise CheckpointError(
                f"{saved[name].path}: tensor '{name}': expected a matrix, found shape {list(saved[name].shape)}"
            )
    if EMBEDDING_KEY in saved:
        raw["vocab_size"] = saved[EMBEDDING_KEY].shape[0]
    family = FAMILIES.get(str(raw.get("model_type")))
    is_tied = family and raw.get("tie_word_embeddings", family.defaults["tie_word_embeddings"])
    alone = EMBEDDING_KEY in saved and not saved.keys() & {OUTPUT_EMBEDDING_KEY, HEAD_KEY}
    if family and is_tied and alone and not ties and raw.get("architectures") == [family.language_model]:
        # In PEFT the logits use the base's embeddings; after merging, they would use the new embeddings.
        raise CheckpointError(
            f"{saved[EMBEDDING_KEY].path}: tensor '{EMBEDDING_KEY}': the base ties its output embeddings to it, and "
            "the adapter has no 'lm_head' and no ensure_weight_tying: merge it into its base with PEFT first"
        )
    if HEAD_KEY in saved and family is not None:
        count = saved[HEAD_KEY].shape[0]
        if raw.get("architectures") != [family.architecture]:
            raw["architectures"] = [family.architecture]
            raw.pop("num_labels", None)
        labels = raw.get("id2label")
        if not isinstance(labels, Mapping) or len(labels) != count:
            raw["id2label"] = {str(number): f"LABEL_{number}" for number in range(count)}
            raw["label2id"] = {f"LABEL_{number}": number for number in range(count)}
    return raw


def describe_adapter(folder: Path) -> str:
    """Return a description of an adapter and its base; "" for other folders."""
    if (read := _opened.get(folder)) is None:
        return ""
    config = read.config
    kind = "DoRA" if config.use_dora else "rsLoRA" if config.use_rslora else "LoRA"
    ranks = sorted({config.rank(config.parameter_of(module) or module) for module in read.factors})
    whole = f"; whole tensors: {listed(sorted(read.saved))}" if read.saved else ""
    base = os.readlink(folder / BASE)
    return f"{kind} of rank {', '.join(map(str, ranks))} on {len(read.factors)} matrices of {base}{whole}"


def _tensors(
    adapter: Path, config: AdapterConfig
) -> tuple[dict[str, dict[str, TensorInfo]], dict[str, TensorInfo]]:
    """Return the factor tensors and the complete tensors; see :class:`_Adapter`."""
    path = next((adapter / name for name in _WEIGHTS if (adapter / name).is_file()), None)
    if path is None:
        raise CheckpointError(f"{adapter}: expected {_WEIGHTS[0]} beside {ADAPTER_CONFIG}, found none")
    factors: dict[str, dict[str, TensorInfo]] = {}
    saved: dict[str, TensorInfo] = {}
    for name, tensor in read_tensors(path).items():
        # In a complete state dict, names contain the adapter's name, "default".
        plain = re.sub(r"(\.modules_to_save)?\.default(?=\.|$)", "", name)
        if not plain.startswith(_PREFIX):
            raise CheckpointError(f"{path}: tensor '{name}': expected a name that starts with {_PREFIX}")
        plain = plain.removeprefix(_PREFIX).replace(".base_layer.bias", ".bias")
        part = next((part for part in _FACTORS if plain.endswith(f".{part}")), None)
        parts = {} if part is None else factors.setdefault(plain.removesuffix(f".{part}"), {})
        if plain in saved or part in parts:
            raise CheckpointError(f"{path}: tensor '{name}': occurs twice, with and without 'default'")
        if part is not None:
            parts[part] = tensor
        elif (
            "lora_" in plain
            or ".base_layer." in plain
            # PEFT also saves the embeddings if the vocabulary grew.
            or not (config.saves(plain) or plain in (EMBEDDING_KEY, OUTPUT_EMBEDDING_KEY))
        ):
            raise CheckpointError(
                f"{path}: tensor '{name}': expected factors of LoRA ({', '.join(_FACTORS)}) or a module that "
                f"modules_to_save of {config.where} names; merge the adapter into its base with PEFT first"
            )
        else:
            saved[plain] = replace(tensor, name=plain)
    for module, parts in factors.items():
        _check_factors(path, module, parts, config)
    return factors, saved


def _check_factors(path: Path, module: str, parts: Mapping[str, TensorInfo], config: AdapterConfig) -> None:
    expected = _FACTORS if config.use_dora else _FACTORS[:2]
    if set(parts) != set(expected):
        raise CheckpointError(
            f"{path}: module '{module}': expected {', '.join(expected)} (use_dora: {str(config.use_dora).lower()}), "
            f"found {', '.join(parts)}"
        )
    magnitude, rows = parts.get("lora_magnitude_vector"), parts["lora_B.weight"].shape[:1]
    if magnitude is not None and magnitude.shape != rows:
        raise CheckpointError(
            f"{path}: tensor '{magnitude.name}': expected shape {list(rows)}, found {list(magnitude.shape)}"
        )
    parameter = config.parameter_of(module)
    if parameter is None and not config.targets(module):
        raise CheckpointError(f"{path}: module '{module}': is not among target_modules of {config.where}")
    for tensor in parts.values():
        if tensor.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{path}: tensor '{tensor.name}': expected floating-point weights, found {tensor.dtype}"
            )
    shapes = (parts["lora_A.weight"].shape, parts["lora_B.weight"].shape)
    rank = config.rank(parameter or module)
    if parameter is not None and [len(shape) for shape in shapes] == [2, 2]:
        # The factors of all experts are in one tensor; their number is compared with the model's when it is read.
        experts, rest = divmod(shapes[0][0], rank)
        rank = rank * experts if not rest else rank
    if [len(shape) for shape in shapes] != [2, 2] or (shapes[0][0], shapes[1][1]) != (rank, rank):
        raise CheckpointError(
            f"{path}: module '{module}': r and rank_pattern of {config.where} say rank {rank}, but the factors have "
            f"shapes {list(shapes[0])} and {list(shapes[1])}"
        )


def index_adapted(folder: Path, side_files: Sequence[tuple[str, str]]) -> WeightIndex:
    """Return the base's tensors with the adapter's updates, for a folder from :func:`adapted_folder`.

    Raises:
      CheckpointError: :func:`index_folder` fails, or an update's matrix is missing from the base or has another shape.
    """
    if (read := _opened.get(folder)) is None:
        raise CheckpointError(
            f"{folder}: holds a folder '{ADAPTER}': expected a model, or the adapter's own folder"
        )
    base, adapter = index_folder(Path(os.readlink(folder / BASE)), side_files=side_files), folder / ADAPTER
    config, factors, saved = read.config, read.factors, read.saved
    updates: dict[str, Update] = dict(base.updates)
    of_experts = dict(base.expert_factors)
    raw: dict[str, Any] = read_object(folder / "config.json", error=CheckpointError, finite=False)
    family = FAMILIES.get(str(raw.get("model_type")))
    experts = None if family is None else family.experts
    for module, parts in factors.items():
        if (parameter := config.parameter_of(module)) is not None:
            if parameter in of_experts:
                raise CheckpointError(
                    f"{config.where}: field 'target_parameters': the base is an adapter of '{parameter}' too: merge it "
                    "first"
                )
            of_experts[parameter] = ExpertFactors(
                a=parts["lora_A.weight"], b=parts["lora_B.weight"], rank=config.rank(parameter),
                scale=config.scale(parameter),
            )  # fmt: skip
            continue
        name = _stored(f"{module}.weight", base, experts)
        matrix = base.tensors.get(name)
        shape = (parts["lora_B.weight"].shape[0], parts["lora_A.weight"].shape[1])
        if matrix is None or matrix.shape != shape:
            found = "no such tensor" if matrix is None else f"shape {list(matrix.shape)}"
            raise CheckpointError(
                f"{base.folder}: tensor '{name}', which the adapter {folder_name(adapter)} updates: expected shape "
                f"{list(shape)}, found {found}: name the base model of this adapter with --base"
            )
        if matrix.dtype not in FLOAT_DTYPES and name not in base.updates:
            raise CheckpointError(
                f"{base.folder}: tensor '{name}': expected floating-point weights, found {matrix.dtype} without scales"
            )
        updates[name] = _LowRank(
            a=parts["lora_A.weight"],
            b=parts["lora_B.weight"],
            magnitude=parts.get("lora_magnitude_vector"),
            scale=config.scale(module),
            before=updates.get(name),
        )
    _check_complete(base.tensors.values(), {*factors, *saved}, config)
    files = tuple(
        dict.fromkeys([*base.files, *(t.path for parts in factors.values() for t in parts.values())])
    )
    return WeightIndex(
        folder,
        files,
        {**base.tensors, **saved},
        {name: update for name, update in updates.items() if name not in saved},
        (
            *base.told,
            *_told_of_base(folder, config, head_of_base=HEAD_KEY in base.tensors.keys() - saved.keys()),
        ),
        of_experts,
    )


def _stored(name: str, base: WeightIndex, experts: ExpertNames | None) -> str:
    """Return the name in the base's files of a tensor of transformers, which may have another name for the router."""
    if experts is None or name in base.tensors or not name.endswith(f".{experts.merged_router}.weight"):
        return name
    return name.removesuffix(f"{experts.merged_router}.weight") + f"{experts.router}.weight"


def folder_name(adapter: Path) -> str:
    """Return the target folder of a link, for messages."""
    return os.readlink(adapter) if adapter.is_symlink() else str(adapter)


def _check_complete(tensors: Iterable[TensorInfo], found: Collection[str], config: AdapterConfig) -> None:
    """Reject an adapter that lacks a tensor or factor which its configuration requires for a tensor of the base.

    Args:
      tensors: Tensors of the base.
      found: Modules with factors, and complete tensors, of the adapter.
    """
    lost = [one.name for one in tensors if config.saves(one.name) and one.name not in found]
    if lost:
        raise CheckpointError(
            f"{config.where}: modules_to_save, task_type or bias says that {listed([quote(name) for name in lost])} "
            "was trained, which the adapter does not have: get the whole adapter, or name its base with --base"
        )
    matrices = [
        one.name.removesuffix(".weight")
        for one in tensors
        if one.name.endswith(".weight") and len(one.shape) == 2 and one.name not in found
    ]
    # PEFT adapts no module of a single expert, even if a file stores each expert separately, and not every router.
    matrices = [module for module in matrices if not _OF_MIXTURE.fullmatch(module)]
    lost = [module for module in matrices if config.targets(module) and module not in found]
    if lost:
        raise CheckpointError(
            f"{config.where}: target_modules names {listed([quote(module) for module in lost])} of the base, of which "
            "the adapter has no factors: get the whole adapter, or name its base with --base"
        )


def _told_of_base(folder: Path, config: AdapterConfig, *, head_of_base: bool) -> list[str]:
    """Return warnings that the base may differ from the base during training.

    Raises:
      CheckpointError: The adapter was trained on a class of another family.
    """
    base, told = Path(os.readlink(folder / BASE)), list[str]()
    if (base / ADAPTER).is_dir():  # the base is an adapter too
        base = Path(os.readlink(base / ADAPTER))
    raw: dict[str, Any] = read_object(folder / "config.json", error=CheckpointError, finite=False)
    classes = {
        name: kind
        for kind, family in FAMILIES.items()
        for name in (family.architecture, family.language_model)
    }
    if classes.get(config.base_class or "", raw.get("model_type")) != raw.get("model_type"):
        raise CheckpointError(
            f"{config.where}: the adapter was trained on a {config.base_class}, and its base {base} is of the family "
            f"{raw.get('model_type')}: name another with --base"
        )
    name = Path(config.base or "").name
    if not any(part == name or part.endswith(f"--{name}") for part in base.parts):
        told.append(f"the adapter was trained on {config.base}, and is read on {base}")
    if config.task_type == "CAUSAL_LM" and head_of_base:
        told.append(
            "the adapter was trained as a language model (task_type CAUSAL_LM), and is read by the reward head of "
            f"{base}"
        )
    return told


@dataclass(frozen=True, kw_only=True)
class _LowRank:
    """W + scale * B A; for DoRA, rows are scaled to the lengths in the magnitude vector."""

    a: TensorInfo  # [r, I]
    b: TensorInfo  # [O, r]
    magnitude: TensorInfo | None  # [O], for DoRA (Liu et al., 2024, equation 5)
    scale: float
    before: Update | None  # update of an adapter in the base

    def __call__(
        self, reader: SliceReader, out: np.ndarray, tensor: TensorInfo, region: tuple[slice, ...]
    ) -> None:
        rows, columns = (slice(*part.indices(size)) for part, size in zip(region, tensor.shape, strict=True))
        # The length of a row requires all its columns.
        read = columns if self.magnitude is None else slice(0, tensor.shape[1])
        merged = np.empty((rows.stop - rows.start, read.stop - read.start), np.float32)
        reader.read(merged, tensor, (rows, read), self.before)
        rank = self.a.shape[0]
        a = np.empty((rank, merged.shape[1]), np.float32)
        b = np.empty((merged.shape[0], rank), np.float32)
        reader.read(a, self.a, (slice(0, rank), read))
        reader.read(b, self.b, (rows, slice(0, rank)))
        merged += np.float32(self.scale) * (b @ a)
        if self.magnitude is not None:
            lengths = np.empty(merged.shape[0], np.float32)
            reader.read(lengths, self.magnitude, (rows,))
            merged *= (lengths / np.linalg.norm(merged, axis=1))[:, None]
            merged = merged[:, columns]
        out[...] = merged.astype(out.dtype)
