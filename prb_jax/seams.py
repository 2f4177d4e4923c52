"""The registry of optional parts and plug-ins, found by kind and name: see :func:`get`.

`BUILTIN` names the parts of this package that the core (a score and a gradient) needs only for some models, machines
or data. The core gets them here and never imports them directly. All other values are plug-ins: from a package with an
entry point, from a module of `--import`, or from a Python file.

A package offers a plug-in by an entry point in its `pyproject.toml`; each kind has a group (`KINDS`):

    [project.entry-points."prb_jax.rewards"]
    short = "my_package.rewards:short"

A module of `--import` offers a plug-in by calling :func:`register_plugin`.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, wraps
from hashlib import sha256
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from prb_jax.errors import PrbError, PrbWarning, RunError, quote

Given = ParamSpec("Given")
Result = TypeVar("Result")

KINDS: Final = {
    "backbones": "prb_jax.models.config.families:Family",
    "benchmarks": "prb_jax.records.benchmarks.benchmark:Benchmark",
    "readouts": "prb_jax.models.readouts.row:ModelRow",
    "few_shot": "prb_jax.personal.few_shot.protocol:Method",
    "gates": "collections.abc:Callable",
    "rewards": "collections.abc:Callable",
}
"""The kinds of plug-ins, each with the type of its values; the group of entry points of a kind is "prb_jax.KIND"."""

_FEW_SHOT: Final = "prb_jax.personal.few_shot"
_METHODS: Final = (
    "pooled offset bayes stacked individual nearest attention pref vpl pal gpo mrm sparse lora "
    "profile_in_context"
)

_BENCHMARKS: Final = (
    "prb rewardbench rewardbench2 rm-bench judgebench llmbar prefeval community-alignment prism rmgap multipref "
    "evaluesteer alignx personalllm"
)

BUILTIN: Final[dict[str, dict[str, str]]] = {
    "attention": {
        "tpu": "prb_jax.models.attention.stream_kernel:KERNEL",
        "StepTable": "prb_jax.models.attention.stream_kernel:kernel_attention",
        "gpu": "prb_jax.models.attention.cudnn:CUDNN",
        "KeyTable": "prb_jax.models.attention.cudnn:cudnn_stream_attention",
        "many blocks": "prb_jax.models.attention.batched:attend_many",
    },
    "benchmarks": {
        name: f"prb_jax.records.benchmarks.{name.replace('-', '_')}:BENCHMARK" for name in _BENCHMARKS.split()
    }
    | {
        "personalrewardbench-prism": "prb_jax.records.benchmarks.personalrewardbench:BENCHMARK",
        "personalrewardbench-arena": "prb_jax.records.benchmarks.personalrewardbench:ARENA",
    },
    "encoder": {
        "module": "prb_jax.models.encoder:HeadedEncoder",
        "open": "prb_jax.models.readouts.pair_model:open_pair_model",
        "load": "prb_jax.scoring.sequence_model:load_pair_model",
        "rewards": "prb_jax.models.readouts.pair_model:PairRewardModule",
        "tokenizer": "prb_jax.text.pair_tokenizer:load_pair_tokenizer",
    },
    "experts": {
        "declare": "prb_jax.models.experts:declare_experts",
        "run": "prb_jax.models.experts:run_experts",
        "tensors": "prb_jax.models.checkpoints.expert_tensors:one_by_one",
    },
    "few_shot": {name: f"{_FEW_SHOT}.{name}:METHOD" for name in _METHODS.split()}
    | {
        "lore": f"{_FEW_SHOT}.lore:LORE",
        "lore_free": f"{_FEW_SHOT}.lore:LORE_FREE",
        "user_embedding": f"{_FEW_SHOT}.user_embedding:INDIVIDUAL",
        "user_clusters": f"{_FEW_SHOT}.user_embedding:CLUSTER",
        "lora_users": f"{_FEW_SHOT}.lora:USERS",
    },
    "evaluation": {
        "aspects": "prb_jax.scoring.prompt_extras:show_aspects",
        "baselines": "prb_jax.scoring.baseline_rows:all_baselines",
        "benchmark check": "prb_jax.scoring.benchmark_scores:check_benchmarks",
        "benchmark files": "prb_jax.scoring.benchmark_scores:write_result_files",
        "benchmark scores": "prb_jax.scoring.benchmark_scores:benchmark_scores",
        "clusters": "prb_jax.runs.clusters:write_clusters",
        "controls": "prb_jax.scoring.controls:choose_controls",
        "control figures": "prb_jax.scoring.controls:control_figures",
        "derived users": "prb_jax.scoring.derived_users:derived_users",
        "leave out": "prb_jax.scoring.left_out:leave_out",
        "tokens": "prb_jax.scoring.prepared_tokens:stored_comparisons",
        "wandb": "prb_jax.runs.weights_and_biases:start_logger",
    },
    "formats": {
        "csv": "prb_jax.records.csv_files:csv_rows",
        "parquet": "prb_jax.records.arrow_tables:parquet_values",
        "parquet rows": "prb_jax.records.arrow_tables:parquet_rows",
        "table": "prb_jax.records.arrow_tables:table_values",
    },
    "kernel tables": {
        "fit": "prb_jax.trees.kernel_tables:for_keys",
        "options": "prb_jax.trees.kernel_tables:for_table",
        "table": "prb_jax.trees.kernel_tables:kernel_table",
    },
    "large data": {
        "join": "prb_jax.records.sources.large:join_large",
        "open": "prb_jax.records.sources.large:open_large",
    },
    "models": {
        "adapter": "prb_jax.models.checkpoints.adapter_folder:adapted_folder",
        "adapted weights": "prb_jax.models.checkpoints.adapter_folder:index_adapted",
        "as stored": "prb_jax.models.checkpoints.as_stored:as_stored",
        "module": "prb_jax.models.readouts.module:reward_module",
        "named readout": "prb_jax.models.readouts.named:named_row",
        "out of range": "prb_jax.models.checkpoints.out_of_range:explain_scores",
        "soft prompts": "prb_jax.personal.prompts:load_prompts",
    },
    "parts": {
        "finish": "prb_jax.runs.parts:finish_part",
        "parse": "prb_jax.runs.parts:parse_part",
    },
    "processes": {
        "encode": "prb_jax.scoring.encode_together:encode_part",
        "same evaluation": "prb_jax.scoring.same_choices:check_same_evaluation",
    },
    "projections": {
        "add": "prb_jax.models.lora:add_arrays",
        "adapted": "prb_jax.models.lora:adapted_project",
    },
    "protocols": {
        "paper": "prb_jax.trees.paper:encode_paper",
        "shorten": "prb_jax.trees.shorten:shortened_prompt",
    },
    "quantisation": {
        "fill": "prb_jax.models.checkpoints.fill_quantized:fill_quantized",
        "form": "prb_jax.models.quantization:quantization_form",
    },
    "recurrent layers": {
        "chunks": "prb_jax.trees.chunk_tables:chunk_table",
        "declare": "prb_jax.models.delta_layer:declare",
        "mix": "prb_jax.models.delta_layer:mix",
        "stream": "prb_jax.models.delta_layer:over_stream",
    },
    "ropes": {
        "llama3": "prb_jax.models.scaled_ropes:llama3",
        "longrope": "prb_jax.models.scaled_ropes:longrope",
        "yarn": "prb_jax.models.scaled_ropes:yarn",
        "yarn attention": "prb_jax.models.scaled_ropes:yarn_attention_factor",
    },
    "scorers": {
        "baseline": "prb_jax.scoring.baselines:baseline_scorer",
        "plug-in": "prb_jax.scoring.plain:plugin_scorer",
        "file": "prb_jax.scoring.plain:file_scorer",
        "function": "prb_jax.scoring.plain:function_scorer",
        "module": "prb_jax.scoring.module_model:load_module",
        "server": "prb_jax.scoring.remote.score_server:open_remote",
        "class server": "prb_jax.scoring.remote.score_server:open_class_server",
        "implicit rewards": "prb_jax.scoring.implicit:load_implicit",
        "fitted method": "prb_jax.study.embedder:load_personalised",
    },
    "sources": {
        "benchmark": "prb_jax.records.sources.benchmarks:BenchmarkSource",
        "folder": "prb_jax.records.sources.folders:open_folder",
        "hub": "prb_jax.records.sources.folders:open_hub",
        "published": "prb_jax.records.sources.benchmarks:open_published",
        "personas": "prb_jax.records.sources.personas:PersonasSource",
        "prepared text": "prb_jax.records.sources.prepared:check_text",
    },
    "storage": {
        "accepts_urls": "prb_jax.platform.storage.urls:accepts_urls",
        "fetched": "prb_jax.platform.storage.urls:fetched",
        "staged": "prb_jax.platform.storage.urls:staged",
    },
    "tables": {
        "baselines": "prb_jax.scoring.baselines:BASELINES",
        "readouts": "prb_jax.models.readouts.registry:ROWS",
    },
    "tokenizers": dict.fromkeys(
        ("InternLM2Tokenizer", "InternLM2TokenizerFast"), "prb_jax.text.internlm2_tokenizer:build_internlm2"
    ),
    "training": {
        "judge": "prb_jax.behaviour.rl.judged:open_judged",
        "kinds of judge": "prb_jax.behaviour.rl.judged:kinds_of",
        "module": "prb_jax.training.modules:start_from_module",
        "module trainer": "prb_jax.training.modules:ModuleTrainer",
    },
    "weights": dict.fromkeys(
        (".bin", ".pt", ".pth"), "prb_jax.models.checkpoints.torch_file:read_torch_file"
    ),
}
"""The values of this package by kind and name: "module:name", imported when it is asked for, never before."""


@dataclass(frozen=True)
class Plugin:
    """A value, and its name for users.

    `origin` is a package and its version, or a file and its sha256; runs record it. It is "" for this package.
    """

    name: str
    value: Any
    origin: str


_registered: dict[tuple[str, str], Plugin] = {}
_broken: set[tuple[str, str]] = set()  # kinds and names whose failure was already reported
_imported: set[Path] = set()  # files of `--import`


def register_plugin(kind: str, name: str, value: Any) -> None:
    """Offer a plug-in under a name, for a module of `--import`, or from Python.

    Args:
      kind: One of "backbones", "benchmarks", "readouts", "few_shot", "gates", "rewards".
      name: Name of the plug-in for users.
      value: Plug-in itself; `docs/plugins.md` describes the type for each kind.

    Raises:
      RunError: If the kind is unknown.
    """
    if kind not in KINDS:
        raise RunError(f"plug-in {quote(name)}: no kind {quote(kind)}; expected one of {', '.join(KINDS)}")
    module = getattr(value, "__module__", None) or type(value).__module__
    _registered[kind, name] = Plugin(name, value, f"registered, of module {module}")


def _group(kind: str) -> str:
    return ".".join(("prb_jax", kind))


@cache
def _entry_points(kind: str, _path: tuple[str, ...]) -> metadata.EntryPoints:
    return metadata.entry_points(group=_group(kind))


def names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind without importing the values: first `BUILTIN`, then plug-ins, sorted."""
    builtin = BUILTIN.get(kind, {})
    offered = {entry.name for entry in _entry_points(kind, tuple(sys.path))}
    offered |= {name for of, name in _registered if of == kind}
    return (*builtin, *sorted(offered - builtin.keys()))


def get(kind: str, name: str) -> Plugin:
    """Return the value of a kind and name: from `BUILTIN`, else registered, else from an entry point.

    A value of `BUILTIN` has an empty origin. A plug-in has the type of its kind. An exception of a plug-in function
    becomes a RunError that names its package.

    Raises:
      RunError: If no package or more than one offers this name, or if the package fails or offers another type.
    """
    if place := BUILTIN.get(kind, {}).get(name):
        return Plugin(name, value_at(place), "")
    if (plugin := _registered.get((kind, name))) is None:
        group = _group(kind)
        entries = list(_entry_points(kind, tuple(sys.path)).select(name=name))
        if not entries:
            offered = ", ".join(names(kind)) or "none is installed"
            raise RunError(
                f"no plug-in {quote(name)} among the entry points {group}: expected one of: {offered}"
            )
        origins = [f"{entry.dist.name} {entry.dist.version}" if entry.dist else "?" for entry in entries]
        if len({entry.value for entry in entries}) > 1:
            raise RunError(f"entry point {group}: {name}: offered by {' and by '.join(origins)}: remove one")
        try:
            value = entries[0].load()
        except (Exception, SystemExit) as error:
            raise RunError(
                f"{origins[0]}: its entry point {group}: {name} = {entries[0].value} fails: "
                f"{type(error).__name__}: {error}"
            ) from error
        plugin = Plugin(name, value, origins[0])
    expected = value_at(KINDS[kind])
    if not isinstance(plugin.value, expected):
        raise RunError(
            f"{plugin.origin}: {kind} {quote(name)}: expected a "
            f"{'function' if expected is Callable else expected.__name__}, found {type(plugin.value).__name__}"
        )
    return replace(plugin, value=guarded(plugin.value, plugin.origin)) if expected is Callable else plugin


def value_at(place: str) -> Any:
    """Import the module of "module:name" and return the value."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def usable_plugins(kind: str) -> list[Plugin]:
    """Return all plug-ins of a kind, not requested by name; leave out a failing one and warn of it once."""
    plugins = []
    for name in names(kind)[len(BUILTIN.get(kind, {})) :]:
        if (kind, name) in _broken and (kind, name) not in _registered:
            continue
        try:
            plugins.append(get(kind, name))
        except RunError as error:
            _broken.add((kind, name))
            warnings.warn(f"left out: {error}", PrbWarning, stacklevel=2)
    return plugins


@contextlib.contextmanager
def errors_of(origin: str) -> Iterator[None]:
    """Turn an error in a plug-in's code into a RunError that names its package; without an origin, re-raise it."""
    try:
        yield
    except PrbError:
        raise
    except (Exception, SystemExit) as error:
        if not origin:
            raise
        raise RunError(f"{origin}: fails: {type(error).__name__}: {error}") from error


def guarded(function: Callable[Given, Result], origin: str) -> Callable[Given, Result]:
    """Return a plug-in's function wrapped in :func:`errors_of`."""

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with errors_of(origin):
            return function(*args, **kwargs)

    return call


def import_plugins(modules: list[str]) -> None:
    """Import the modules of `--import`, which register plug-ins: files, or module names (also in the working
    directory).

    Raises:
      RunError: If a module does not exist or fails.
    """
    for module in modules:
        if module.endswith(".py"):
            _run(module)
            _imported.add(Path(module).resolve())
            continue
        sys.path.append(os.getcwd())
        try:
            import_module(module)
        except PrbError:
            raise
        except (Exception, SystemExit) as error:
            raise RunError(f"--import {module}: {type(error).__name__}: {error}") from error
        finally:
            sys.path.remove(os.getcwd())


def is_python_value(text: object) -> bool:
    """Return whether a text names a value of a Python file, as FILE.py:NAME."""
    file, colon, name = str(text).rpartition(":")
    return isinstance(text, str) and bool(colon) and file.endswith(".py") and name.isidentifier()


def is_imported(text: str) -> bool:
    """Return whether the user passed the file of FILE.py:NAME to `--import`, and so allows it to run."""
    return Path(text.rpartition(":")[0]).resolve() in _imported


def python_value(text: str) -> Plugin:
    """Return the value of FILE.py:NAME; its origin contains the digest of the file.

    Raises:
      RunError: If the file or name does not exist, or the file fails.
    """
    file, _, name = text.rpartition(":")
    namespace = _run(file)
    if name not in namespace:
        raise RunError(f"{file}: expected {quote(name)} in it, found none")
    return Plugin(
        name, namespace[name], f"{Path(file).name}, sha256 {sha256(Path(file).read_bytes()).hexdigest()}"
    )


def _run(file: str) -> dict[str, Any]:
    if not Path(file).is_file():
        raise RunError(f"{file}: no such file; expected a Python file")
    try:
        return runpy.run_path(file)
    except PrbError:
        raise
    except (Exception, SystemExit) as error:
        raise RunError(f"{file}: the file fails: {type(error).__name__}: {error}") from error
