"""Configuration and read-out of a model folder, from its files; code in the folder is never run."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints.hf_map import module_name
from prb_jax.models.checkpoints.weight_index import WeightIndex, index_folder
from prb_jax.models.config.decoder import (
    STANDARD,
    DecoderConfig,
    WeightLayout,
    parse_config,
    read_raw_config,
    refuse_language_model,
)
from prb_jax.models.config.families import FAMILIES, refuse_encoder
from prb_jax.models.config.fields import FieldReader
from prb_jax.models.head import EMBEDDING_KEY, HEAD_KEY, Head, Linear, Vocabulary, is_one_row
from prb_jax.models.readouts.row import ModelRow, known_rows
from prb_jax.models.readouts.rules import READOUTS
from prb_jax.seams import errors_of, get
from prb_jax.text.template import PLACEHOLDERS, TextRules


@dataclass(frozen=True)
class ResolvedModel:
    """Model in a folder."""

    config: DecoderConfig  # decoder with its head and tensor names
    row: ModelRow  # matching row of the table
    # rule for the reward, if the user named one of :data:`prb_jax.models.readouts.rules.READOUTS`
    rule: str | None = None
    # True if the checkpoint's head is ignored and the head of the configuration must be initialised
    new_head: bool = False

    @property
    def readout(self) -> str | None:
        """Name of a non-linear read-out, in the form of ``--readout``; None for a linear one, which has rules
        instead."""
        head = self.config.head
        if together := getattr(head, "together", None):
            return f"{self.row.name}:{together}"
        return None if isinstance(head, Linear) else self.row.name

    @property
    def text(self) -> TextRules:
        """Text rules in addition to the chat template."""
        if self.row.append_field is None:
            return self.row.text
        fields = FieldReader(self.config.original, f"{self.row.name}: config.json")
        if not fields.has(self.row.append_field):
            return self.row.text
        given = fields.integer(self.row.append_field, minimum=0, maximum=2**31 - 1)
        return replace(self.row.text, append_id=given)


def resolve_model(
    folder: str | Path, *, name: str = "", readout: str | None = None, new_head: bool = False
) -> ResolvedModel:
    """Return the configuration of a model folder with its read-out.

    Candidates are, in this order: the row named by ``readout``; a row recognised only by the model's name; the first
    row with classes, tensors and fields of the folder; a ``*ForSequenceClassification``.

    Args:
      folder: Folder with ``config.json`` and weights.
      name: Name given by the user: a hub id, or the folder.
      readout: Row of the table; row of a process model with the reduction of steps, e.g. ``qwen2-prm:min``;
        ``steps:ID`` or ``steps:ID:min`` for two labels at every token with this id;
        ``vocabulary:ID``, ``vocabulary:ID,ID``, ``vocabulary:ID=NUMBER,ID=NUMBER,...``; or a rule for several labels.
      new_head: If True, open a model without a linear head of one output with such a head, to be initialised later.

    Raises:
      CheckpointError: The read-out or architecture is unknown, or the head is missing or does not fit; the message
        names the tensor or field and the remedy.
    """
    folder = Path(folder)
    raw = read_raw_config(folder)
    refuse_encoder(raw, where=str(folder / "config.json"))
    rule = readout if readout in READOUTS else None
    asked = None
    if readout is not None and rule is None:
        asked = get("models", "named readout").value(readout)
    stored = _Stored(folder, raw, name or str(folder))
    row = asked or _recognise(stored)
    where = str(folder / "config.json")
    named = FAMILIES[raw["model_type"]].architecture if raw.get("model_type") in FAMILIES else None
    as_written = row is None or (row.standard and raw.get("architectures") == [named])
    shown = row or stored.known() or known_rows()["linear"]
    try:
        if as_written:
            config = parse_config(raw, where=where)
            refuse_language_model(config, where=where)
        else:
            config = _configured(shown, stored, where=where)
    except CheckpointError as error:
        if new_head:
            return _with_new_head(shown, stored, None, where=where)
        raise (_with_what_is_missing(error, stored) if as_written else error) from None
    if new_head and not (config.num_labels == 1 and is_one_row(config.head) and stored.has_head(config)):
        return _with_new_head(shown, stored, config.head, where=where)
    return ResolvedModel(config, shown, rule)


def is_plain_language_model(folder: str | Path, *, name: str = "") -> bool:
    """Return True if a folder contains a ``*ForCausalLM`` that matches no row of the table of reward models.

    Args:
      folder: Folder with ``config.json`` of a decoder.
      name: Name given by the user.
    """
    raw = read_raw_config(Path(folder))
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None or raw.get("architectures") != [family.language_model]:
        return False
    stored = _Stored(Path(folder), raw, name or str(folder))
    return _recognise(stored) is None


def class_names(raw: Mapping[str, Any]) -> frozenset[str]:
    """Return the class names in a ``config.json``, including classes of remote code."""
    auto_map = raw.get("auto_map")
    values = [raw.get("architectures"), *(auto_map.values() if isinstance(auto_map, Mapping) else ())]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return frozenset(text.rsplit(".", 1)[-1] for text in texts if isinstance(text, str))


class _Stored:
    """Contents of a folder relevant to its read-out; weight files are indexed once, on first use."""

    def __init__(self, folder: Path, raw: dict[str, Any], name: str) -> None:
        self.folder, self.raw, self.name = folder, raw, name
        self.classes = class_names(raw)
        self._indexes: dict[Any, WeightIndex | CheckpointError] = {}

    def index(self, layout: WeightLayout) -> WeightIndex:
        files = layout.side_files
        if files not in self._indexes:
            try:
                self._indexes[files] = index_folder(self.folder, side_files=files)
            except CheckpointError as error:
                self._indexes[files] = error
        if isinstance(index := self._indexes[files], CheckpointError):
            raise index
        return index

    def names(self, layout: WeightLayout) -> Collection[str]:
        """Return the names of all tensors; empty if they cannot be read, which loading reports later."""
        try:
            return self.index(layout).tensors.keys()
        except CheckpointError:
            return ()

    def has_tensors(self, row: ModelRow) -> bool:
        weights = self.names(STANDARD)
        if not weights or any(name in weights for name in row.without):
            return False
        return self.index(row.layout).tensors.keys() >= set(row.tensors)

    def has_part(self, row: ModelRow) -> bool:
        """Return True if the folder has some of a row's tensors that no standard model has."""
        return any(name in self.names(row.layout) for name in {*row.tensors} - {HEAD_KEY, EMBEDDING_KEY})

    def is_called(self, row: ModelRow) -> bool:
        full, last = self.name.lower(), Path(self.name).name.lower()
        patterns = [model.lower() for model in row.models]
        return any(fnmatchcase(full, one) or fnmatchcase(last, one.split("/")[-1]) for one in patterns)

    def has_head(self, config: DecoderConfig) -> bool:
        """Return True if the tensor of a linear head, or the tensor that contains its row, exists."""
        assert isinstance(config.head, Linear | Vocabulary)
        return config.head.key in self.index(config.layout).tensors

    def known(self) -> ModelRow | None:
        """Return the row of a standard model recognised by its name."""
        return next((row for row in known_rows().values() if row.standard and self.is_called(row)), None)


def _recognise(stored: _Stored) -> ModelRow | None:
    """Return the row for a folder; None for a ``*ForSequenceClassification`` of transformers."""
    for row in known_rows().values():
        if row.standard or (row.by_name and not stored.is_called(row)):
            continue
        if row.classes and not stored.classes & set(row.classes):
            continue
        if any(stored.raw.get(name) is None for name in row.fields):
            continue
        # A class name determines the meaning of tensors; without a class name the tensors must exist.
        if row.tensors and not (row.classes or stored.has_tensors(row)):
            continue
        return row
    return None


def _with_what_is_missing(error: CheckpointError, stored: _Stored) -> CheckpointError:
    """Return the error; for a model recognised by name or part of its head, add the tensors that the folder lacks."""
    for row in known_rows().values():
        called = stored.is_called(row)
        if not row.tensors or not (called or stored.has_part(row)):
            continue
        how = "name" if called else "tensors"
        files = [name for name, _ in row.layout.side_files if not (stored.folder / name).exists()]
        beside = f" (in {', '.join(files)})" if files else ""
        return CheckpointError(
            f"{error}. By its {how} this is a model of the row '{row.name}', whose head tensors "
            f"{', '.join(row.tensors)}{beside} are not all here: get the whole checkpoint"
        )
    return error


def _with_new_head(row: ModelRow, stored: _Stored, head: Head | None, *, where: str) -> ResolvedModel:
    """Return the body of a row with a new head; tensors of the checkpoint's head, if known, are ignored."""
    config, layout = _body(row, stored, where=where)
    of_head = [] if head is None else [tensor.key for tensor in head.tensors(config)]
    if isinstance(head, Linear):
        of_head.append(head.bias_key)
    ignored = (*layout.ignored, *((re.escape(name), "replaced by a new head") for name in of_head))
    return ResolvedModel(replace(config, layout=replace(layout, ignored=ignored)), row, new_head=True)


def _body(row: ModelRow, stored: _Stored, *, where: str) -> tuple[DecoderConfig, WeightLayout]:
    """Return the configuration of a row's body with a standard head, and its tensor names."""
    raw = dict(stored.raw)
    if row.model_type is not None:
        raw["model_type"] = row.model_type
    if row.translate is not None:
        with errors_of(row.origin):
            raw = row.translate(raw)
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is not None:  # otherwise parsing reports the supported families
        raw["architectures"] = [family.architecture]
    raw.pop("auto_map", None)
    one_label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    raw.pop("num_labels", None)
    config = parse_config(raw | one_label, where=where)
    tensors, layout = stored.index(row.layout).tensors, row.layout
    for prefix in row.prefixes:
        layout = replace(row.layout, prefix=prefix)
        if f"{module_name(layout, 'final_norm')}.weight" in tensors:
            break
    return config, layout


def _configured(row: ModelRow, stored: _Stored, *, where: str) -> DecoderConfig:
    config, layout = _body(row, stored, where=where)
    index = stored.index(row.layout)
    shapes = {name: tensor.shape for name, tensor in index.tensors.items()}
    raw = config.original | {"final_logit_softcapping": config.final_logit_softcapping}
    with errors_of(row.origin):
        head = row.head.bound(shapes, raw, where=str(stored.folder), what=row.name)
    if isinstance(head, Linear) and shapes[head.key][:1] != (1,):
        raise CheckpointError(
            f"{index.tensors[head.key].path}: tensor '{head.key}' of the read-out '{row.name}': expected shape "
            f"[1, {config.hidden_size}], found {list(shapes[head.key])}"
        )
    # Fields read by the head count as supported.
    in_head = (value for value in vars(row.head).values() if isinstance(value, str))
    told = {*row.fields, *PLACEHOLDERS, row.append_field, *in_head}
    ignored = tuple(name for name in config.ignored_keys if name not in told)
    named = tuple(stored.raw.get("architectures") or sorted(stored.classes))
    return replace(config, head=head, layout=layout, ignored_keys=ignored, architectures=named)
