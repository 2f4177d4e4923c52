"""Export of trained weights to Hugging Face folders: a whole model, or a PEFT adapter with its head."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, RunError
from prb_jax.models.checkpoints.hf_map import LeafMap, leaf_maps
from prb_jax.models.checkpoints.save import save_params
from prb_jax.models.decoder import Params
from prb_jax.models.head import HEAD_KEY
from prb_jax.models.lora import FACTOR_A, FACTOR_B, merge_lora
from prb_jax.models.model import abstract_model
from prb_jax.platform.processes.sharing import on_first_process, process_count, process_index
from prb_jax.platform.sharding import replicated
from prb_jax.records.writing import say_finished
from prb_jax.text.open_tokenizer import class_without_code
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.training.config import RunOptions
from prb_jax.training.start import Start

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_MORE_TEMPLATES = "additional_chat_templates"  # transformers' folder of named templates
_TEMPLATE = "chat_template.jinja"

Write = Callable[[Path], None]  # writes the files of a folder that is renamed into place when complete


def export_model(
    params: Params, start: Start, folder: Path, *, mesh: Mesh, settings: RunOptions, more: Write
) -> None:
    """Write a model that `prb_jax.load` and transformers load; adapters are merged into their matrices.

    The folder appears complete or not at all. Every process of a run must call this; the first one writes. The head
    stays float32, regardless of the dtype of the other weights.

    Args:
      params: Trained parameters, with or without adapters.
      start: Model they come from: architecture and tokenizer.
      folder: Folder to write; it must not exist.
      mesh: Mesh of the parameters.
      settings: Settings of the run.
      more: Function that writes further files.

    Raises:
      RunError: The folder exists or cannot be written.
    """
    kind = jnp.dtype(settings.exported_dtype)
    merged = merge_lora(start.config, params, scale=settings.lora_scale)
    # One leaf at a time: each float32 original can be freed before the next leaf is cast.
    cast = {
        name: leaf if name == "score" else jax.tree.map(lambda x: x.astype(kind), leaf)
        for name, leaf in merged.items()
    }
    host = _gather(cast, mesh)

    def write(partial: Path) -> None:
        save_params(host, start.config, partial, raw_config=start.raw_config)
        copy_tokenizer(start.tokenizer, start.tokenizer_folder, partial)
        more(partial)

    on_first_process(lambda: write_whole(folder, write))


def export_adapter(
    params: Params, start: Start, folder: Path, *, mesh: Mesh, settings: RunOptions, more: Write
) -> None:
    """Write the adapters, and the head of a reward model, for PEFT: `PeftModel.from_pretrained(base_model, folder)`.

    For the arguments and errors see :func:`export_model`. `params` must have adapters.
    """
    lora = settings.lora
    layers = abstract_model(start.config, layers=tuple(params["layers"])).layers
    declared = {name: each for name, each in vars(layers).items() if isinstance(each, nnx.LoRAParam)}
    factors = {name: params["layers"][name] for name in declared}
    head = {"score": params["score"]} if "score" in params else {}
    host = _gather({"layers": factors, **head}, mesh)
    maps = leaf_maps(start.config)
    modules = {leaf.path[-1]: leaf for leaf in maps if leaf.quantisable or leaf.transposed}
    adapted: dict[str, list[LeafMap]] = {}  # our matrices for each tensor of the file
    of_experts: dict[str, list[LeafMap]] = {}  # our matrices for each tensor of all experts
    for name in dict.fromkeys(each.get_metadata("of") for each in declared.values()):
        leaf = modules[name]
        together = "down_proj" if name == "down" else "gate_up_proj"
        some, key = (of_experts, together) if "{expert}" in leaf.key else (adapted, leaf.key)
        some.setdefault(key, []).append(leaf)

    def short(key: str) -> str:
        """Return the end of a module's name that tells it from all others."""
        parts = key.split(".")[:-1]
        return ".".join(
            parts[parts.index("{layer}") + 1 :] if start.config.experts is not None else parts[-1:]
        )

    # As names of modules, PEFT would take these for the experts'; as names of tensors it does not.
    beside = {
        key for key, many in adapted.items() if many[0].path[-1].startswith(("dense_", "shared_"))
    }  # fmt: skip

    def contiguous(array: Any) -> np.ndarray:
        return np.ascontiguousarray(np.asarray(array, np.float32))

    def write(partial: Path) -> None:
        from safetensors.numpy import save_file

        tensors = {f"base_model.model.{HEAD_KEY}": contiguous(host[name].T) for name in head}
        for leaves in adapted.values():
            for layer, name in enumerate(leaves[0].file_keys):
                a, b = _peft_factors(leaves, host["layers"], layer)
                module = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a, b
        for parameter, leaves in of_experts.items():
            for index, layer in enumerate(leaves[0].layers):
                module = leaves[0].key.partition(".{expert}")[0].format(layer=layer)
                # PEFT wraps the module once for each tensor; the wrapper of the first tensor is inside.
                inner = ".base_layer" if parameter == "gate_up_proj" and len(of_experts) > 1 else ""
                # Experts are in `mlp` in every model of transformers.
                module = f"base_model.model.{module.replace('block_sparse_moe', 'mlp')}{inner}"
                a, b = _expert_factors(leaves, host["layers"], index)
                tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a, b
        partial.mkdir(parents=True)
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        described = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if head else "CAUSAL_LM",
            "base_model_name_or_path": start.name,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(short(key) for key in adapted.keys() - beside),
            "modules_to_save": [*head] or None,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "use_rslora": False,
        }
        parameters = [f"mlp.experts.{name}" for name in of_experts] + [
            f"{short(key)}.weight" for key in beside
        ]
        described |= {"target_parameters": sorted(parameters) or None}
        fused = {short(key): len(many) for key, many in adapted.items() if many[0].pieces}
        if fused := fused | {
            f"mlp.experts.{name}": len(many) for name, many in of_experts.items() if many[1:]
        }:
            described["rank_pattern"] = {name: lora.rank * count for name, count in fused.items()}
            described["alpha_pattern"] = {name: lora.alpha * count for name, count in fused.items()}
        (partial / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        copy_tokenizer(start.tokenizer, start.tokenizer_folder, partial)
        more(partial)

    on_first_process(lambda: write_whole(folder, write))


def _peft_factors(
    leaves: Sequence[LeafMap], factors: Mapping[str, Any], layer: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B of one PEFT module. If a tensor fuses several matrices, their ranks are concatenated."""
    pairs = [
        [
            np.ascontiguousarray(np.asarray(factors[f"{leaf.path[-1]}{factor}"][layer], np.float32).T)
            for factor in (FACTOR_A, FACTOR_B)
        ]
        for leaf in leaves
    ]
    if leaves[0].pieces is None:
        return pairs[0][0], pairs[0][1]
    rank = len(pairs[0][0])
    whole = np.zeros((leaves[0].file_shape[0], rank * len(pairs)), np.float32)
    for number, (leaf, (_, b)) in enumerate(zip(leaves, pairs)):
        assert leaf.pieces is not None
        done = 0
        for start, stop in leaf.pieces:
            whole[start:stop, number * rank : (number + 1) * rank] = b[done : done + stop - start]
            done += stop - start
    return np.concatenate([a for a, _ in pairs]), whole


def _expert_factors(
    leaves: Sequence[LeafMap], factors: Mapping[str, Any], layer: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return A [E * r, I] and B [O, r * E] of all experts of a layer for PEFT; ranks of gate and up are concatenated.

    The order is that of `ParamWrapper` in PEFT: A expert by expert, B with the experts of each rank together.
    """
    pairs = [
        [
            np.asarray(factors[f"{leaf.path[-1]}{factor}"][layer], np.float32)
            for factor in (FACTOR_A, FACTOR_B)
        ]
        for leaf in leaves
    ]
    first_a, first_b = pairs[0]
    count, inputs, rank = first_a.shape
    separate = leaves[0].path[-1] in ("gate", "up")
    outputs = first_b.shape[-1]
    whole = np.zeros((outputs * (2 if separate else 1), rank * len(pairs), count), np.float32)
    for number, (leaf, (_, b)) in enumerate(zip(leaves, pairs)):
        start = outputs if leaf.path[-1] == "up" else 0
        whole[start : start + outputs, number * rank : (number + 1) * rank] = b.transpose(2, 1, 0)
    joined = np.concatenate([a.transpose(0, 2, 1) for a, _ in pairs], axis=1)
    return joined.reshape(-1, inputs), whole.reshape(len(whole), -1)


def copy_tokenizer(tokenizer: ChatTokenizer, source: Path, folder: Path) -> None:
    """Copy the tokenizer's files, and write the chat template in use if it differs from the template in the files.

    A tokenizer that needs code from its repository is written as a ``tokenizer.json``, which needs no code.
    """
    if class_without_code(source) is not None:
        tokenizer.tokenizer.save_pretrained(folder)
    else:
        for name in TOKENIZER_FILES:
            copy_file(source / name, folder / name)
        for path in sorted((source / _MORE_TEMPLATES).glob("*.jinja")):
            (folder / _MORE_TEMPLATES).mkdir(exist_ok=True)
            copy_file(path, folder / _MORE_TEMPLATES / path.name)
    text = tokenizer.template.text
    if tokenizer.template.reads_clock:  # omit the macro that fixes the clock; loading adds it again
        text = text.partition("{% endmacro %}\n")[2]
    try:
        stored = tokenizer.tokenizer.get_chat_template()
    except ValueError:
        stored = None
    if text != stored:
        (folder / _TEMPLATE).write_text(text, encoding="utf-8")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file if it exists."""
    if source.is_file():
        shutil.copyfile(source, target)


def _gather(params: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Return parameters that the first process can write: unchanged with one process, else as numpy arrays.

    With several processes, stacked leaves are gathered layer by layer, so no device ever holds a whole leaf.
    """
    if process_count() == 1:
        return dict(params)
    everywhere = replicated(mesh)
    take = jax.jit(
        lambda leaf, layer: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False),
        out_shardings=everywhere,
    )
    whole = jax.jit(lambda leaf: leaf, out_shardings=everywhere)
    keep = process_index() == 0

    def one(leaf: jax.Array) -> np.ndarray:
        host = np.empty(leaf.shape if keep else (0,), leaf.dtype)
        if leaf.ndim < 3:
            value = whole(leaf).addressable_data(0)
            return np.asarray(value) if keep else host
        for layer in range(leaf.shape[0]):
            value = take(leaf, layer).addressable_data(0)
            if keep:
                host[layer] = np.asarray(value)
        return host

    return jax.tree.map(one, dict(params))


def _files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def write_whole(target: Path, write: Write) -> None:
    """Let `write` fill a folder under a temporary name, then rename the folder to `target`.

    If a folder with the same files exists, an earlier call finished it; a message reports this.

    Raises:
      RunError: The folder exists with other files, or cannot be written; no partial files remain.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        if not target.exists():
            partial.replace(target)
            return
        is_same = _files(target) == _files(partial) and all(
            filecmp.cmp(target / name, partial / name, shallow=False) for name in _files(partial)
        )
        shutil.rmtree(partial)
        if not is_same:
            raise RunError(f"{target}: exists already, with other files; choose another folder")
        say_finished(target)
    except (OSError, CheckpointError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise RunError(f"{target}: the model cannot be written: {reason}") from error
