"""Export of trained adapters for PEFT, with the head of a reward model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from prb_jax.models.checkpoints.hf_map import LeafMap, leaf_maps
from prb_jax.models.decoder import Params
from prb_jax.models.head import HEAD_KEY
from prb_jax.models.lora import FACTOR_A, FACTOR_B
from prb_jax.models.model import abstract_model
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.training.config import RunOptions
from prb_jax.training.export import Write, copy_tokenizer, gather, write_whole
from prb_jax.training.start import Start


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
    host = gather({"layers": factors, **head}, mesh)
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
