"""Export of trained weights to Hugging Face folders; adapters for PEFT are in `prb_jax.training.adapter_export`."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, RunError
from prb_jax.models.checkpoints.save import save_params
from prb_jax.models.decoder import Params
from prb_jax.platform.processes.sharing import on_first_process, process_count, process_index
from prb_jax.platform.sharding import replicated
from prb_jax.records.writing import say_finished
from prb_jax.seams import get
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
    merged = params
    if settings.tuning == "lora":
        merged = get("projections", "merge").value(start.config, params, scale=settings.lora_scale)
    # One leaf at a time: each float32 original can be freed before the next leaf is cast.
    cast = {
        name: leaf if name == "score" else jax.tree.map(lambda x: x.astype(kind), leaf)
        for name, leaf in merged.items()
    }
    host = gather(cast, mesh)

    def write(partial: Path) -> None:
        save_params(host, start.config, partial, raw_config=start.raw_config)
        copy_tokenizer(start.tokenizer, start.tokenizer_folder, partial)
        more(partial)

    on_first_process(lambda: write_whole(folder, write))


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


def gather(params: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
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
