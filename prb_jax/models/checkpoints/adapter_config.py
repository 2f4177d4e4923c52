"""Parsing of a PEFT adapter's `adapter_config.json`: every field is applied, has no effect, or is refused by name.

Names and rules are as in PEFT (https://github.com/huggingface/peft).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.checkpoints.locate import ADAPTER_CONFIG
from prb_jax.models.head import OUTPUT_EMBEDDING_KEY
from prb_jax.records.reading import read_object

_LONGEST_PATTERN = 2_000  # characters of a regular expression
# Fields of `adapter_config.json` that do not affect the scores of a trained adapter.
_NEUTRAL = frozenset(
    [
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
    ]
)
_FOLLOWED = frozenset(
    [
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
        "bias",
        "init_lora_weights",
        "peft_type",
        "task_type",
        "auto_mapping",
        "ensure_weight_tying",
    ]
)
_STARTS = (
    True,
    False,
    None,
    "gaussian",
    "eva",
    "orthogonal",
)  # initialisations of A and B that do not change the base


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Fields of `adapter_config.json` that affect scores, under the same names."""

    where: str  # file, for messages
    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: str | tuple[str, ...] = ()
    target_parameters: tuple[
        str, ...
    ] = ()  # tensors of all experts, or weights of modules, with one adapter each
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] = ()  # only if `target_modules` is a list; empty for all
    layers_pattern: tuple[str, ...] = ()  # names of the layer list, before the layer numbers
    modules_to_save: tuple[str, ...] = ()
    bias: str = "none"
    ensure_weight_tying: bool = False
    task_type: str | None = None
    base: str | None = None  # `base_model_name_or_path`
    revision: str | None = None  # revision of the base
    base_class: str | None = (
        None  # transformers' class of the base during training, if `auto_mapping` contains it
    )

    def rank(self, module: str) -> int:
        """Return the rank of a module's update."""
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """Return the scale of a module's update: alpha / r, or alpha / sqrt(r) for rsLoRA."""
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def parameter_of(self, module: str) -> str | None:
        """Return the tensor of all experts that the factors of a module update; None if they update its weight.

        PEFT wraps the module of the experts once for each adapted tensor, the first tensor innermost.
        """
        plain = module
        while plain.endswith(_WRAPPED):
            plain = plain.removesuffix(_WRAPPED)
        depth = (len(module) - len(plain)) // len(_WRAPPED)
        if not plain.endswith(".experts"):
            return None
        named = [
            f"{plain}.{one}" for one in _OF_EXPERTS if _is_named(self.target_parameters, f"{plain}.{one}")
        ]
        return named[-1 - depth] if depth < len(named) else None

    def targets(self, module: str) -> bool:
        """Return True if PEFT adapts a module of this name."""
        saved = (re.match(rf"(.*\.)?{re.escape(one)}($|\.)", module) for one in self.modules_to_save)
        if _is_named(self.exclude_modules, module) or any(saved):
            return False
        if f"{module}.weight" == OUTPUT_EMBEDDING_KEY and not self.has_output_embedding:
            return False
        if _is_named(self.target_parameters, f"{module}.weight"):
            return True
        if self.target_modules == "all-linear":
            return re.match(r"(.*\.)?layers\.", module) is not None
        if (
            not self.layers_to_transform
            or isinstance(self.target_modules, str)
            or module in self.target_modules
        ):
            return _is_named(self.target_modules, module)
        lists = "|".join(self.layers_pattern) or r".*?\.[^.]*"
        layer = re.match(rf"(?:.*?\.)??(?:{lists})\.(\d+)\.", module)
        listed = layer is not None and int(layer[1]) in self.layers_to_transform
        return listed and _is_named(self.target_modules, module)

    def saves(self, tensor: str) -> bool:
        """Return True if the adapter replaces this tensor of the base."""
        module, _, kind = tensor.rpartition(".")
        if kind == "bias" and (self.bias == "all" or (self.bias == "lora_only" and self.targets(module))):
            return True
        if tensor == OUTPUT_EMBEDDING_KEY and not self.has_output_embedding:
            return False
        heads = ("score", "classifier") if self.task_type == "SEQ_CLS" else ()
        names = "|".join(re.escape(one) for one in (*self.modules_to_save, *heads))
        return bool(names) and re.match(rf".*({names})($|\.)", module) is not None

    @property
    def has_output_embedding(self) -> bool:
        """True if the file names a language model as the model during training."""
        return self.task_type in (None, "CAUSAL_LM")


_WRAPPED = ".base_layer"
_OF_EXPERTS = ("gate_up_proj", "down_proj")  # in the order of transformers' declarations


def _is_named(names: str | tuple[str, ...], module: str) -> bool:
    """Return True if a regular expression matches a module's name, or the name ends with a listed name."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in names)


def _by_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first key, a regular expression, that matches the end of a module's name."""
    found = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)


def read_adapter_config(adapter: Path) -> AdapterConfig:
    """Return the configuration of an adapter's folder.

    Raises:
      CheckpointError: A field is unsupported or has an invalid value; the message names the field.
    """
    where = adapter / ADAPTER_CONFIG
    raw = read_object(where, error=CheckpointError)

    def wrong(name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{where}: field '{name}': expected {expected}, found {quote(raw.get(name))}")

    if raw.get("peft_type") != "LORA":
        raise wrong(
            "peft_type",
            "LORA: other kinds of adapters are not supported; merge it into its base with PEFT first",
        )
    for name, value in raw.items():
        if name not in _NEUTRAL | _FOLLOWED and value not in (None, False, {}, [], ""):
            expected = "none: it is not followed here; merge the adapter into its base with PEFT first"
            raise wrong(name, expected)
    if raw.get("init_lora_weights", True) not in _STARTS:
        raise wrong(
            "init_lora_weights", "a start that leaves the base as it is; convert the adapter with PEFT first"
        )

    def number(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise wrong(name, "a number above 0")
        return value

    def texts(name: str) -> tuple[str, ...]:
        value = raw.get(name) or []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise wrong(name, "a list of names")
        return tuple(value)

    def pattern(name: str) -> dict[str, float]:
        value = raw.get(name) or {}
        if not isinstance(value, Mapping):
            raise wrong(name, "an object")
        return {_regular(key, name, wrong): number(name, one) for key, one in value.items()}

    def modules(name: str) -> str | tuple[str, ...]:
        value = raw.get(name)
        return _regular(value, name, wrong) if isinstance(value, str) else texts(name)

    def whole(name: str, value: Any) -> int:
        if number(name, value) != int(value):
            raise wrong(name, "a whole number")
        return int(value)

    def flag(name: str) -> bool:
        if raw.get(name) not in (None, True, False):
            raise wrong(name, "true or false")
        return bool(raw.get(name))

    if raw.get("bias", "none") not in ("none", "all", "lora_only"):
        raise wrong("bias", "none, all or lora_only")
    parameters = texts("target_parameters")
    known = "|".join((*_OF_EXPERTS, "weight"))
    if not all(re.fullmatch(rf"(.*\.)?({known})", one) for one in parameters):
        raise wrong(
            "target_parameters", f"tensors of experts ({', '.join(_OF_EXPERTS)}) or names that end in .weight"
        )
    if parameters and flag("use_dora"):
        raise wrong("use_dora", "false, as PEFT has no DoRA for target_parameters")
    layers = raw.get("layers_to_transform")
    layers = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if not all(type(one) is int for one in layers):
        raise wrong("layers_to_transform", "a number of a layer, or a list of them")
    if isinstance(raw.get("layers_pattern"), str):
        raw["layers_pattern"] = [raw["layers_pattern"]] if raw["layers_pattern"] else []
    mapping = raw.get("auto_mapping")
    named_class = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    named = raw.get("base_model_name_or_path")
    return AdapterConfig(
        where=str(where),
        r=whole("r", raw.get("r", 8)),
        lora_alpha=number("lora_alpha", raw.get("lora_alpha", 8)),
        use_rslora=flag("use_rslora"),
        use_dora=flag("use_dora"),
        ensure_weight_tying=flag("ensure_weight_tying"),
        rank_pattern={key: whole("rank_pattern", value) for key, value in pattern("rank_pattern").items()},
        alpha_pattern=pattern("alpha_pattern"),
        target_modules=modules("target_modules"),
        target_parameters=parameters,
        exclude_modules=modules("exclude_modules"),
        layers_to_transform=tuple(layers),
        layers_pattern=tuple(_regular(one, "layers_pattern", wrong) for one in texts("layers_pattern")),
        modules_to_save=texts("modules_to_save"),
        bias=raw.get("bias", "none"),
        task_type=raw.get("task_type"),
        base=named if isinstance(named, str) and named else None,
        revision=raw.get("revision"),
        base_class=named_class,
    )


def _regular(text: str, name: str, wrong: Callable[[str, str], CheckpointError]) -> str:
    try:
        re.compile(text if len(text) <= _LONGEST_PATTERN else "(")
    except re.error:
        raise wrong(name, f"regular expressions of at most {_LONGEST_PATTERN:,} characters") from None
    return text
