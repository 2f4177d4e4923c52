"""The row of the table of reward models that a folder belongs to, and models with a head of another kind."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints.hf_map import module_name
from prb_jax.models.checkpoints.weight_index import WeightIndex, index_folder
from prb_jax.models.config.decoder import STANDARD, DecoderConfig, WeightLayout, parse_config, read_raw_config
from prb_jax.models.config.families import FAMILIES
from prb_jax.models.head import EMBEDDING_KEY, HEAD_KEY, Head, Linear
from prb_jax.models.readouts.open_model import ResolvedModel
from prb_jax.models.readouts.row import ModelRow, known_rows
from prb_jax.models.vocabulary_heads import Vocabulary, is_one_row
from prb_jax.plugins import errors_of
from prb_jax.text.template import PLACEHOLDERS


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
    return Recognised(Path(folder), raw, name=name or str(folder)).found is None


def class_names(raw: Mapping[str, Any]) -> frozenset[str]:
    """Return the class names in a ``config.json``, including classes of remote code."""
    auto_map = raw.get("auto_map")
    values = [raw.get("architectures"), *(auto_map.values() if isinstance(auto_map, Mapping) else ())]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return frozenset(text.rsplit(".", 1)[-1] for text in texts if isinstance(text, str))


class Recognised:
    """The row of a model folder; weight files are indexed once, on first use.

    Args:
      folder: Folder with ``config.json`` and weights.
      raw: Contents of ``config.json``.
      name: Name given by the user: a hub id, or the folder.
      asked: Row that the user named.
    """

    def __init__(
        self, folder: Path, raw: dict[str, Any], *, name: str, asked: ModelRow | None = None
    ) -> None:
        self.folder, self.raw, self.name = folder, raw, name
        self.where = str(folder / "config.json")
        self.classes = class_names(raw)
        self._indexes: dict[Any, WeightIndex | CheckpointError] = {}
        self._asked = asked

    @cached_property
    def found(self) -> ModelRow | None:
        """Row for the folder; None for a ``*ForSequenceClassification`` of transformers."""
        return self._asked or self._recognise()

    @property
    def row(self) -> ModelRow:
        """Row for the folder, or of the standard model with its name, or the row of all standard models."""
        return self.found or self.known() or known_rows()["linear"]

    @property
    def as_written(self) -> bool:
        """True for a ``*ForSequenceClassification`` of transformers, whose ``config.json`` says everything."""
        family = FAMILIES.get(str(self.raw.get("model_type")))
        named = None if family is None else family.architecture
        return self.found is None or (self.found.standard and self.raw.get("architectures") == [named])

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

    def has_one_row(self, config: DecoderConfig) -> bool:
        """Return True if the head is a product with one matrix, which the folder has."""
        head = config.head
        return (
            is_one_row(head)
            and isinstance(head, Linear | Vocabulary)
            and head.key in self.index(config.layout).tensors
        )

    def known(self) -> ModelRow | None:
        """Return the row of a standard model recognised by its name."""
        return next((row for row in known_rows().values() if row.standard and self.is_called(row)), None)

    def _recognise(self) -> ModelRow | None:
        for row in known_rows().values():
            if row.standard or (row.by_name and not self.is_called(row)):
                continue
            if row.classes and not self.classes & set(row.classes):
                continue
            if any(self.raw.get(name) is None for name in row.fields):
                continue
            # A class name determines the meaning of tensors; without a class name the tensors must exist.
            if row.tensors and not (row.classes or self.has_tensors(row)):
                continue
            return row
        return None

    def explained(self, error: CheckpointError) -> CheckpointError:
        """Return the error of a standard model; if its name or tensors are a row's, add the tensors that it lacks."""
        if not self.as_written:
            return error
        for row in known_rows().values():
            called = self.is_called(row)
            if not row.tensors or not (called or self.has_part(row)):
                continue
            how = "name" if called else "tensors"
            files = [name for name, _ in row.layout.side_files if not (self.folder / name).exists()]
            beside = f" (in {', '.join(files)})" if files else ""
            return CheckpointError(
                f"{error}. By its {how} this is a model of the row '{row.name}', whose head tensors "
                f"{', '.join(row.tensors)}{beside} are not all here: get the whole checkpoint"
            )
        return error

    def with_new_head(self, head: Head | None) -> ResolvedModel:
        """Return the body of a row with a new head; tensors of the checkpoint's head, if known, are ignored."""
        config, layout = self._body(self.row)
        of_head = [] if head is None else [tensor.key for tensor in head.tensors(config)]
        if isinstance(head, Linear):
            of_head.append(head.bias_key)
        ignored = (*layout.ignored, *((re.escape(name), "replaced by a new head") for name in of_head))
        return ResolvedModel(
            replace(config, layout=replace(layout, ignored=ignored)), self.row, new_head=True
        )

    def _body(self, row: ModelRow) -> tuple[DecoderConfig, WeightLayout]:
        """Return the configuration of a row's body with a standard head, and its tensor names."""
        raw = dict(self.raw)
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
        config = parse_config(raw | one_label, where=self.where)
        tensors, layout = self.index(row.layout).tensors, row.layout
        for prefix in row.prefixes:
            layout = replace(row.layout, prefix=prefix)
            if f"{module_name(layout, 'final_norm')}.weight" in tensors:
                break
        return config, layout

    def configured(self) -> DecoderConfig:
        """Return the configuration of the folder with the head of its row."""
        row = self.row
        config, layout = self._body(row)
        index = self.index(row.layout)
        shapes = {name: tensor.shape for name, tensor in index.tensors.items()}
        raw = config.original | {"final_logit_softcapping": config.final_logit_softcapping}
        with errors_of(row.origin):
            head = row.head.bound(shapes, raw, where=str(self.folder), what=row.name)
        if isinstance(head, Linear) and shapes[head.key][:1] != (1,):
            raise CheckpointError(
                f"{index.tensors[head.key].path}: tensor '{head.key}' of the read-out '{row.name}': expected shape "
                f"[1, {config.hidden_size}], found {list(shapes[head.key])}"
            )
        # Fields read by the head count as supported.
        in_head = (value for value in vars(row.head).values() if isinstance(value, str))
        told = {*row.fields, *PLACEHOLDERS, row.append_field, *in_head}
        ignored = tuple(name for name in config.ignored_keys if name not in told)
        named = tuple(self.raw.get("architectures") or sorted(self.classes))
        return replace(config, head=head, layout=layout, ignored_keys=ignored, architectures=named)
