"""What `adapter_config.json` of a PEFT adapter says: every field is followed, has no effect, or is refused by name.

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
from prb_jax.models.head import EMBEDDING_KEY, OUTPUT_EMBEDDING_KEY
from prb_jax.records.reading import read_object

_LONGEST_PATTERN = 2_000  # characters of a regular expression
# Fields of `adapter_config.json` that change no score of a trained adapter.
_NEUTRAL = frozenset(
    [
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "layers_pattern",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
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
        "exclude_modules",
        "layers_to_transform",
        "modules_to_save",
        "bias",
        "init_lora_weights",
        "peft_type",
    ]
)
_STARTS = (
    True,
    False,
    None,
    "gaussian",
    "eva",
    "orthogonal",
)  # starts of A and B that leave the base as it is


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The fields of `adapter_config.json` that decide scores, named as there."""

    where: str  # the file, for messages
    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: str | tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    bias: str = "none"
    task_type: str | None = None
    complete: bool = True  # every module that `target_modules` names is adapted
    base: str | None = None  # `base_model_name_or_path`
    revision: str | None = None  # of the base

    def rank(self, module: str) -> int:
        """The rank of a module's update."""
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """The factor of a module's update: alpha / r, of rsLoRA alpha / sqrt(r)."""
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Tell whether `target_modules` names a module."""
        if self.target_modules == "all-linear":
            return True
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, module) is not None
        return any(f".{module}".endswith(f".{name}") for name in self.target_modules)

    def saves(self, tensor: str) -> bool:
        """Tell whether a whole tensor may stand in the adapter in place of the base's."""
        module, _, kind = tensor.rpartition(".")
        if kind == "bias" and (self.bias == "all" or (self.bias == "lora_only" and self.targets(module))):
            return True
        heads = ("score", "classifier") if self.task_type == "SEQ_CLS" else ()
        names = "|".join(re.escape(one) for one in (*self.modules_to_save, *heads))
        saved = bool(names) and re.match(rf".*({names})($|\.)", module) is not None
        # PEFT saves the embeddings, too, if the vocabulary grew.
        return saved or tensor in (EMBEDDING_KEY, OUTPUT_EMBEDDING_KEY)


def _by_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first key, a regular expression of the end of a module's name, that a module has."""
    found = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)


def read_adapter_config(adapter: Path) -> AdapterConfig:
    """Return the configuration of an adapter's folder.

    Raises:
      CheckpointError: a field that is not followed, or has a value that it cannot have; names it.
    """
    where = adapter / ADAPTER_CONFIG
    raw = read_object(where, error=CheckpointError)

    def wrong(name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{where}: field '{name}': expected {expected}, found {quote(raw.get(name))}")

    if raw.get("peft_type") != "LORA":
        raise wrong(
            "peft_type", "LORA: other adapters are not followed; merge it into its base with PEFT first"
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

    targets = raw.get("target_modules")
    if raw.get("bias", "none") not in ("none", "all", "lora_only"):
        raise wrong("bias", "none, all or lora_only")
    rank = number("r", raw.get("r", 8))
    if rank != int(rank):
        raise wrong("r", "a whole number")
    named = raw.get("base_model_name_or_path")
    return AdapterConfig(
        where=str(where),
        r=int(rank),
        lora_alpha=number("lora_alpha", raw.get("lora_alpha", 8)),
        use_rslora=bool(raw.get("use_rslora")),
        use_dora=bool(raw.get("use_dora")),
        rank_pattern={key: int(value) for key, value in pattern("rank_pattern").items()},
        alpha_pattern=pattern("alpha_pattern"),
        target_modules=(
            _regular(targets, "target_modules", wrong)
            if isinstance(targets, str)
            else texts("target_modules")
        ),
        modules_to_save=texts("modules_to_save"),
        bias=raw.get("bias", "none"),
        task_type=raw.get("task_type"),
        complete=not (raw.get("layers_to_transform") or raw.get("exclude_modules"))
        and targets != "all-linear",
        base=named if isinstance(named, str) and named else None,
        revision=raw.get("revision"),
    )


def _regular(text: str, name: str, wrong: Callable[[str, str], CheckpointError]) -> str:
    try:
        re.compile(text if len(text) <= _LONGEST_PATTERN else "(")
    except re.error:
        raise wrong(name, f"regular expressions of at most {_LONGEST_PATTERN:,} characters") from None
    return text
