"""Comparisons as a data set of tensorflow-datasets. Importing this module registers ``prb_comparisons``.

    import prb_jax.records.sources.tfds_builder
    source = tfds.data_source("prb_comparisons", split="test", data_dir=DIR,
                              builder_kwargs={"sources": ["prb"]})      # prepares it on first use
    source[7]["question"]

A prepared folder is found by name without the import: ``tfds.data_source`` and, with TensorFlow, ``tfds.load`` accept
``("prb_comparisons", data_dir=DIR)``.

Fields match a record (``prb_jax.records.comparison``), always as prompt, responses and labels. In addition "question"
is the last user message of the prompt and "is_pair" the spelling of the record. Absent fields are empty texts or lists,
or NaN for ``margin``; "absent" lists them. ``rubric_aspects`` and ``narrative`` are private: never show them to a
scored model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.example_serializer import ExampleSerializer

from prb_jax.errors import DataError, quote
from prb_jax.records.comparison import Comparison, Post, RubricAspect
from prb_jax.records.conversation import Turns, is_rendered, turns_of
from prb_jax.records.files import file_digest
from prb_jax.records.sources.prepared import DIGESTS, NAME, OPTIONAL


class PrbComparisons(tfds.core.GeneratorBasedBuilder):
    """Builds the data set from any source of ``read_comparisons``, in the order of the source.

    Args:
      sources: Files, folders or names; only needed if nothing is prepared yet.
      splits: Splits of the sources to read; they keep their names.
      options: Options of tensorflow-datasets builders, e.g. ``data_dir`` and ``file_format`` ("array_record" if not
        given).
    """

    name = NAME
    VERSION = tfds.core.Version("1.1.0")
    RELEASE_NOTES = {"1.0.0": "First release.", "1.1.0": "Orders of profiles."}  # noqa: RUF012 - the name and type that the base class has

    def __init__(
        self, *, sources: Sequence[str] = (), splits: Sequence[str] = ("test",), **options: Any
    ) -> None:
        self._sources, self._splits = tuple(sources), tuple(splits)
        options["file_format"] = options.get("file_format") or "array_record"
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        texts = {name: tfds.features.Sequence(text) for name in ("responses", "absent")}
        objects = {
            name: tfds.features.Sequence(dict.fromkeys(parts, text))
            for name, parts in (
                ("prompt", ("role", "content")),
                ("profile", [item.name for item in fields(Post)]),
                ("rubric_aspects", [item.name for item in fields(RubricAspect)]),
            )
        }
        # Numbers are stored as bytes, because number fields of examples on disk have only 32 bits.
        numbers = {
            name: tfds.features.Tensor(shape=shape, dtype=np.float64, encoding="bytes")
            for name, shape in (("labels", (None,)), ("margin", ()))
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description="Comparisons of responses to one prompt, for one user.",
            features=tfds.features.FeaturesDict(
                {
                    **dict.fromkeys(("id", "question", *OPTIONAL), text),
                    **(texts | objects | numbers),
                    "is_pair": np.bool_,
                }
            ),
            disable_shuffling=True,  # keeps the order of the source, which a run reports
            metadata=tfds.core.MetadataDict(made_of(self._sources, self._splits)),
        )

    def _download_and_prepare(self, *args: Any, **options: Any) -> None:
        def serialized(serializer: Any, example: Any) -> bytes:
            # The order of maps in protocol buffers differs between processes.
            return serializer.get_tf_example(example).SerializeToString(deterministic=True)

        with mock.patch.object(ExampleSerializer, "serialize_example", serialized):
            super()._download_and_prepare(*args, **options)
        files = sorted(path for path in Path(self.data_dir).iterdir() if path.is_file())
        digests = {path.name: file_digest(path) for path in files}
        (Path(self.data_dir) / DIGESTS).write_text(json.dumps(digests) + "\n", encoding="utf-8")

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> Mapping[str, Iterator[tuple[int, Mapping[str, Any]]]]:
        if not self._sources:
            raise DataError(
                f"{self.data_dir}: contains no prepared data, and there are no sources to prepare"
            )
        return {split: self._generate_examples(split) for split in self._splits}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        from prb_jax.records.intake import each_comparison

        place: dict[str, str] = {}
        for source in self._sources:
            for comparison in each_comparison(source, split=split):
                if comparison.id in place:
                    found = f"in {place[comparison.id]} and in {source}"
                    raise DataError(f"comparison id {quote(comparison.id)} occurs twice: {found}")
                yield len(place), to_example(comparison)
                place[comparison.id] = source


def made_of(sources: Sequence[str], splits: Sequence[str]) -> dict[str, Any]:
    """Return a JSON-ready description of a data set of these sources, for its metadata.

    Raises:
      DataError: A source does not exist or cannot be read.
    """
    from prb_jax.records.intake import benchmark_of, describe_source

    named = {benchmark_of(source) for source in sources}
    return {
        "sources": [describe_source(source, split=split) for split in splits for source in sources],
        "splits": list(splits),
        "benchmark": named.pop() if len(named) == 1 else None,
    }


def to_example(comparison: Comparison) -> dict[str, Any]:
    """Convert a labelled comparison to an example; ``prb_jax.records.sources.prepared.to_row`` converts it back.

    Raises:
      DataError: A conversation contains more than texts, which the files cannot represent.
    """
    turns = [*comparison.prompt, *(turn for text in comparison.responses for turn in turns_of(text))]
    if (
        is_rendered(turns)
        or any(turn.fields or turn.context for turn in turns)
        or any(isinstance(r, Turns) for r in comparison.responses)
    ):
        raise DataError(
            f"comparison {quote(comparison.id)}: prepared files hold prompts and responses as texts, found "
            "rendered text, tools, thoughts or a response of several messages: give the JSON lines themselves as data"
        )
    row = comparison.to_row()
    return {
        **{name: row.get(name, "") for name in OPTIONAL},
        "id": comparison.id,
        "question": comparison.question,
        "prompt": row.get("prompt", [{"role": "user", "content": comparison.question}]),
        "responses": list(comparison.responses),
        "labels": np.array(comparison.labels or (), np.float64),
        "is_pair": comparison.is_pair,
        "profile": row.get("profile", []),
        "margin": np.float64(row.get("margin", math.nan)),
        "rubric_aspects": row.get("rubric_aspects", []),
        "absent": [name for name in OPTIONAL if name not in row],
    }
