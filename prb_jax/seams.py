"""The registry of optional parts and plug-ins, found by kind and name: see :func:`get`.

`BUILTIN` names the parts of this package that the core (a score and a gradient) needs only for some models, machines
or data. The core gets them here and never imports them directly. All other values are plug-ins: from a package with an
entry point, from a module of `--import`, or from a Python file; :mod:`prb_jax.plugins` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

KINDS: Final = {
    "backbones": "prb_jax.models.config.family:Family",
    "benchmarks": "prb_jax.records.benchmarks.benchmark:Benchmark",
    "readouts": "prb_jax.models.readouts.row:ModelRow",
    "few_shot": "prb_jax.personal.few_shot.protocol:Method",
    "gates": "collections.abc:Callable",
    "rewards": "collections.abc:Callable",
}
"""The kinds of plug-ins, each with the type of its values; the group of entry points of a kind is "prb_jax.KIND"."""

_FEW_SHOT: Final = "prb_jax.personal.few_shot"
_METHODS: Final = "pooled offset bayes stacked individual nearest attention pref vpl pal gpo mrm sparse lora"
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
        "over mesh": "prb_jax.models.attention.mesh:over_mesh",
        "many blocks": "prb_jax.models.attention.batched:attend_many",
        "all keys": "prb_jax.models.attention.batched:attend_to_all_keys",
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
        "sizes": "prb_jax.models.config.experts:parse_experts",
        "tensors": "prb_jax.models.checkpoints.expert_tensors:one_by_one",
    },
    "few_shot": {name: f"{_FEW_SHOT}.{name}:METHOD" for name in _METHODS.split()}
    | {
        "profile_in_context": f"{_FEW_SHOT}.profile_in_context:METHOD",
        "lore": f"{_FEW_SHOT}.lore:LORE",
        "lore_free": f"{_FEW_SHOT}.lore:LORE_FREE",
        "user_embedding": f"{_FEW_SHOT}.user_embedding:INDIVIDUAL",
        "user_clusters": f"{_FEW_SHOT}.user_embedding:CLUSTER",
        "lora_users": f"{_FEW_SHOT}.lora:USERS",
    },
    "evaluation": {
        "adapted": "prb_jax.scoring.history:with_history",
        "history": "prb_jax.scoring.history:read_history",
        "aspects": "prb_jax.scoring.prompt_extras:show_aspects",
        "baselines": "prb_jax.scoring.baseline_rows:all_baselines",
        "benchmark check": "prb_jax.scoring.benchmark_scores:check_benchmarks",
        "benchmark files": "prb_jax.scoring.benchmark_scores:write_result_files",
        "benchmark scores": "prb_jax.scoring.benchmark_scores:benchmark_scores",
        "clusters": "prb_jax.runs.clusters:write_clusters",
        "controls": "prb_jax.scoring.controls:choose_controls",
        "control figures": "prb_jax.scoring.controls:control_figures",
        "check too long": "prb_jax.scoring.left_out:check_too_long",
        "leave out": "prb_jax.scoring.left_out:leave_out",
        "prepared": "prb_jax.scoring.prepared_tokens:tokens_of_job",
        "summary": "prb_jax.scoring.summary:sum_up",
        "tokens": "prb_jax.scoring.prepared_tokens:stored_comparisons",
        "wandb": "prb_jax.runs.weights_and_biases:start_logger",
    },
    "formats": {
        "csv": "prb_jax.records.csv_files:csv_rows",
        "foreign column": "prb_jax.records.foreign_fields:is_foreign_column",
        "foreign fields": "prb_jax.records.foreign_fields:ForeignMapper",
        "message field": "prb_jax.records.foreign_fields:nearest_message_field",
        "other": "prb_jax.records.other_files:other_rows",
        "parquet": "prb_jax.records.arrow_tables:parquet_values",
        "parquet rows": "prb_jax.records.arrow_tables:parquet_rows",
        "remarks": "prb_jax.records.remarks:with_remarks",
        "table": "prb_jax.records.arrow_tables:table_values",
    },
    "kernel tables": {
        "even pairs": "prb_jax.trees.even_work:with_even_pairs",
        "fit": "prb_jax.trees.kernel_tables:for_keys",
        "lengths": "prb_jax.trees.kernel_tables:for_lengths",
        "options": "prb_jax.trees.kernel_tables:for_table",
        "table": "prb_jax.trees.kernel_tables:kernel_table",
    },
    "large data": {
        "blocks": "prb_jax.runs.blocks:open_blocks",
        "digest": "prb_jax.records.large_lines:large_digest",
        "filled": "prb_jax.runs.blocks:filled",
        "join": "prb_jax.records.sources.large:join_large",
        "open": "prb_jax.records.sources.large:open_large",
        "stamp": "prb_jax.records.large_lines:stamp",
        "table": "prb_jax.scoring.large_table:LargeTable",
        "train": "prb_jax.training.large_data:read_large",
    },
    "meshes": {"make": "prb_jax.platform.meshes:mesh_of"},
    "messages": {
        "context": "prb_jax.records.messages:context_of",
        "read": "prb_jax.records.messages:read_messages",
        "rendered": "prb_jax.records.messages:rendered_text",
    },
    "mixed layers": {
        "gated queries": "prb_jax.models.gated_queries:declare_gated_queries",
        "kinds": "prb_jax.models.config.mixed_layers:mixed_kinds",
        "stacks": "prb_jax.models.mixed_stacks:MixedStacks",
    },
    "models": {
        "adapter": "prb_jax.models.checkpoints.adapter_folder:adapted_folder",
        "adapted weights": "prb_jax.models.checkpoints.adapter_folder:index_adapted",
        "as stored": "prb_jax.models.checkpoints.as_stored:as_stored",
        "exported": "prb_jax.models.checkpoints.exported:check_exported",
        "hub": "prb_jax.models.checkpoints.hub_folder:snapshot_of",
        "module": "prb_jax.models.readouts.module:reward_module",
        "named readout": "prb_jax.models.readouts.named:named_row",
        "origin of family": "prb_jax.models.config.families:origin_of",
        "tied embeddings": "prb_jax.models.checkpoints.tied:check_tied_embeddings",
        "text part": "prb_jax.models.config.families:text_model",
        "text tensors": "prb_jax.models.checkpoints.beside_vision:text_tensors",
        "unknown architecture": "prb_jax.models.config.unknown:unknown_architecture",
        "out of range": "prb_jax.models.checkpoints.out_of_range:explain_scores",
        "recognised": "prb_jax.models.readouts.recognise:Recognised",
        "soft prompts": "prb_jax.personal.prompts:load_prompts",
    },
    "parts": {
        "finish": "prb_jax.runs.parts:finish_part",
        "parse": "prb_jax.runs.parts:parse_part",
    },
    "progress": {
        "compiling": "prb_jax.runs.progress:compiling",
        "rows": "prb_jax.runs.progress:show_rows",
    },
    "rematerialised": {
        "body": "prb_jax.models.rematerialised:rematerialised",
        "frozen": "prb_jax.models.rematerialised:frozen",
        "gather": "prb_jax.models.rematerialised:gatherer",
    },
    "runs": {
        "check file": "prb_jax.runs.sealed:check_file",
        "check inputs": "prb_jax.runs.other_inputs:check_same_inputs",
        "check record": "prb_jax.runs.sealed:check_record",
        "check sealed": "prb_jax.runs.sealed:check_sealed",
        "read rows": "prb_jax.runs.read_rows:read_rows",
        "seal": "prb_jax.runs.sealed:seal",
    },
    "processes": {
        "agreement": "prb_jax.platform.processes.agreement:check_agreement",
        "fetch": "prb_jax.platform.processes.collectives:fetched",
        "gather": "prb_jax.platform.processes.collectives:gathered",
        "share": "prb_jax.platform.processes.collectives:broadcast",
        "stops at a step": "prb_jax.platform.processes.job:stops_at_a_step",
        "encode": "prb_jax.scoring.encode_together:encode_part",
        "encode all": "prb_jax.scoring.encode_together:encode_by_processes",
        "same evaluation": "prb_jax.scoring.same_choices:check_same_evaluation",
    },
    "policies": {
        "check held-out": "prb_jax.behaviour.rl.watch:check_held_out",
        "reason to stop": "prb_jax.behaviour.rl.watch:reason_to_stop",
        "watch": "prb_jax.behaviour.rl.watch:GoldWatch",
    },
    "projections": {
        "add": "prb_jax.models.lora:add_arrays",
        "adapted": "prb_jax.models.lora:adapted_project",
        "merge": "prb_jax.models.lora:merge_lora",
        "start": "prb_jax.models.lora:init_lora",
    },
    "protocols": {
        "paper": "prb_jax.scoring.paper:encode_paper",
        "paper remarks": "prb_jax.scoring.paper:paper_remarks",
        "shorten": "prb_jax.scoring.shorten:shortened",
    },
    "quantisation": {
        "fill": "prb_jax.models.checkpoints.fill_quantized:fill_quantized",
        "form": "prb_jax.models.quantization:quantization_form",
    },
    "recurrent layers": {
        "chunks": "prb_jax.trees.chunk_tables:chunk_table",
        "declare": "prb_jax.models.delta_layer:declare",
        "mix": "prb_jax.models.delta_layer:mix",
        "mixers": "prb_jax.models.config.recurrence:layer_mixers",
        "sizes": "prb_jax.models.config.recurrence:parse_recurrence",
        "no prompts": "prb_jax.models.delta_cache:empty_prefix",
        "no samples": "prb_jax.models.delta_cache:empty_suffix",
        "prompts of streams": "prb_jax.models.delta_cache:prefix_at_ends",
        "over caches": "prb_jax.models.delta_cache:over_caches",
        "longer prompts": "prb_jax.models.delta_cache:longer_prefix",
        "stream": "prb_jax.models.delta_layer:over_stream",
    },
    "ropes": {
        "llama3": "prb_jax.models.scaled_ropes:llama3",
        "longrope": "prb_jax.models.scaled_ropes:longrope",
        "parse": "prb_jax.models.config.ropes:parse_ropes",
        "yarn": "prb_jax.models.scaled_ropes:yarn",
        "yarn attention": "prb_jax.models.scaled_ropes:yarn_attention_factor",
    },
    "scorers": {
        "baseline": "prb_jax.scoring.baselines:baseline_scorer",
        "own": "prb_jax.scoring.own_scorer:OwnScorer",
        "plug-in": "prb_jax.scoring.plain:plugin_scorer",
        "file": "prb_jax.scoring.plain:file_scorer",
        "function": "prb_jax.scoring.plain:function_scorer",
        "module": "prb_jax.scoring.module_model:load_module",
        "other kind": "prb_jax.scoring.kinds:open_other",
        "server": "prb_jax.scoring.remote.score_server:open_remote",
        "class server": "prb_jax.scoring.remote.score_server:open_class_server",
        "implicit rewards": "prb_jax.scoring.implicit:load_implicit",
        "fitted method": "prb_jax.study.embedder:load_personalised",
    },
    "sources": {
        "benchmark": "prb_jax.records.sources.benchmarks:BenchmarkSource",
        "folder": "prb_jax.records.sources.folders:open_folder",
        "hub": "prb_jax.records.sources.folders:open_hub",
        "python": "prb_jax.records.sources.python:PythonSource",
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
        "families": "prb_jax.models.config.families:FAMILIES",
        "readouts": "prb_jax.models.readouts.registry:ROWS",
    },
    "templates": {
        "clock": "prb_jax.text.template_clock:fix_clock",
        "compile": "prb_jax.text.rendering:compile_template",
        "last token": "prb_jax.text.text_rules:last_token",
        "suffix": "prb_jax.text.text_rules:checked_suffix",
        "normaliser": "prb_jax.text.normalisers:check_growth",
        "own mark": "prb_jax.text.own_marks:own_mark",
    },
    "tokenizers": dict.fromkeys(
        ("InternLM2Tokenizer", "InternLM2TokenizerFast"), "prb_jax.text.internlm2_tokenizer:build_internlm2"
    ),
    "training": {
        "judge": "prb_jax.behaviour.rl.judged:open_judged",
        "kinds of judge": "prb_jax.behaviour.rl.judged:kinds_of",
        "as standard": "prb_jax.training.layouts:as_standard",
        "check tokenizer": "prb_jax.training.layouts:refuse_other_ids",
        "check convertible": "prb_jax.training.layouts:check_convertible",
        "standard tokenizer": "prb_jax.training.layouts:standard_tokenizer",
        "scratch": "prb_jax.training.scratch:from_scratch",
        "curves": "prb_jax.training.curves:plot_curves",
        "same contents": "prb_jax.training.same_contents:tell_same_contents",
        "user order": "prb_jax.training.user_order:UserOrder",
        "tensorboard": "prb_jax.training.events:EventFile",
        "export adapter": "prb_jax.training.adapter_export:export_adapter",
        "check wandb": "prb_jax.runs.weights_and_biases:check_wandb",
        "module": "prb_jax.training.modules:start_from_module",
        "soft prompts": "prb_jax.training.soft_prompts:soft_prompts_of_run",
        "wandb": "prb_jax.runs.weights_and_biases:start_wandb",
        "module trainer": "prb_jax.training.modules:ModuleTrainer",
    },
    "views": {"trained": "prb_jax.text.trained_view:read_trained_view"},
    "weights explained": {
        "head": "prb_jax.models.checkpoints.explained:missing_head",
        "none": "prb_jax.models.checkpoints.explained:no_weights",
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


def names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind without importing the values: first `BUILTIN`, then plug-ins, sorted."""
    builtin = BUILTIN.get(kind, {})
    offered: set[str] = value_at("prb_jax.plugins:offered_names")(kind)
    return (*builtin, *sorted(offered - builtin.keys()))


def get(kind: str, name: str) -> Plugin:
    """Return the value of a kind and name: from `BUILTIN`, with an empty origin, else a plug-in.

    Raises:
      RunError: No package or more than one offers this name, or the package fails or offers another type.
    """
    place = BUILTIN.get(kind, {}).get(name)
    if place is None:
        return value_at("prb_jax.plugins:find")(kind, name)
    return Plugin(name, value_at(place), "")


def value_at(place: str) -> Any:
    """Import the module of "module:name" and return the value."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def is_python_value(text: object) -> bool:
    """Return whether a text names a value of a Python file, as FILE.py:NAME."""
    file, colon, name = str(text).rpartition(":")
    return isinstance(text, str) and bool(colon) and file.endswith(".py") and name.isidentifier()
