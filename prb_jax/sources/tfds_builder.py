"""Comparisons as a data set of tensorflow-datasets. Importing this module registers ``prb_comparisons``.

    import prb_jax.sources.tfds_builder
    source = tfds.data_source("prb_comparisons", split="test", data_dir=DIR,
                              builder_kwargs={"sources": ["prb"]})      # prepared first, if it is not yet
    source[7]["question"]

A folder that is prepared already is found by name without the import: ``tfds.data_source`` and, with
TensorFlow, ``tfds.load`` take ``("prb_comparisons", data_dir=DIR)``.

Fields are those of a record (``prb_jax.data.comparison``), always as prompt, responses and labels; beside
them "question" is the last message of the prompt and "is_pair" the spelling of the record. What is absent
is an empty text or list, and NaN for ``margin``; "absent" names it. ``rubric_aspects`` and ``narrative`` are
private: they must not be shown to a scored model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.example_serializer import ExampleSerializer

from prb_jax.data.comparison import Comparison
from prb_jax.data.files import file_digest
from prb_jax.errors import DataError, quote
from prb_jax.sources.prepared import DIGESTS, NAME, OPTIONAL


class PrbComparisons(tfds.core.GeneratorBasedBuilder):
    """Builds the data set from any source of ``read_comparisons``, in the order of the source.

    Args:
      sources: files, folders or names; needed only where nothing is prepared yet.
      splits: which splits of the sources to read; they keep their names.
      options: of every builder of tensorflow-datasets, as ``data_dir`` and ``file_format``
        ("array_record" if not given).
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
        # Numbers are kept as bytes: the number fields of a record on disk have no more than 32 bits.
        return tfds.core.DatasetInfo(
            builder=self,
            description="Comparisons of responses to one prompt, for one user.",
            features=tfds.features.FeaturesDict(
                {
                    "id": text,
                    "question": text,
                    "prompt": tfds.features.Sequence({"role": text, "content": text}),
                    "responses": tfds.features.Sequence(text),
                    "labels": tfds.features.Tensor(shape=(None,), dtype=np.float64, encoding="bytes"),
                    "is_pair": np.bool_,
                    "user_id": text,
                    "profile": tfds.features.Sequence({"id": text, "category": text, "text": text}),
                    "profile_order": text,
                    "category": text,
                    "subset": text,
                    "margin": tfds.features.Tensor(shape=(), dtype=np.float64, encoding="bytes"),
                    "rubric_aspects": tfds.features.Sequence(
                        {"aspect": text, "evidence": text, "reason": text}
                    ),
                    "narrative": text,
                    "absent": tfds.features.Sequence(text),
                }
            ),
            disable_shuffling=True,  # the order of the source is part of what a run reports
            metadata=tfds.core.MetadataDict(made_of(self._sources, self._splits)),
        )

    def _download_and_prepare(self, *args: Any, **options: Any) -> None:
        def serialized(serializer: Any, example: Any) -> bytes:
            # Maps of protocol buffers have an order of their own in every process.
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
                f"{self.data_dir}: nothing is prepared there, and no sources are given to prepare"
            )
        return {split: self._generate_examples(split) for split in self._splits}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        from prb_jax.sources.reading import each_comparison

        place: dict[str, str] = {}
        for source in self._sources:
            for comparison in each_comparison(source, split=split):
                if comparison.id in place:
                    found = f"in {place[comparison.id]} and in {source}"
                    raise DataError(f"comparison id {quote(comparison.id)} occurs twice: {found}")
                yield len(place), to_example(comparison)
                place[comparison.id] = source


def made_of(sources: Sequence[str], splits: Sequence[str]) -> dict[str, Any]:
    """What a data set of these sources holds, JSON-ready; kept in its metadata.

    Raises:
      DataError: for a source that does not exist or cannot be read.
    """
    from prb_jax.sources.reading import benchmark_of, describe_source

    named = {benchmark_of(source) for source in sources}
    return {
        "sources": [describe_source(source, split=split) for split in splits for source in sources],
        "splits": list(splits),
        "benchmark": named.pop() if len(named) == 1 else None,
    }


def to_example(comparison: Comparison) -> dict[str, Any]:
    """A comparison with labels as it is stored; ``prb_jax.sources.prepared.to_row`` turns it back."""
    return {
        "id": comparison.id,
        "question": comparison.question,
        "prompt": [{"role": m.role, "content": m.content} for m in comparison.prompt],
        "responses": list(comparison.responses),
        "labels": np.array(comparison.labels or (), np.float64),
        "is_pair": comparison.is_pair,
        "user_id": comparison.user_id or "",
        "profile": [{"id": p.id, "category": p.category, "text": p.text} for p in comparison.profile],
        "profile_order": comparison.profile_order or "",
        "category": comparison.category or "",
        "subset": comparison.subset or "",
        "margin": np.float64(math.nan if comparison.margin is None else comparison.margin),
        "rubric_aspects": [
            {"aspect": a.aspect, "evidence": a.evidence, "reason": a.reason}
            for a in comparison.rubric_aspects
        ],
        "narrative": comparison.narrative or "",
        "absent": [name for name in OPTIONAL if getattr(comparison, name) is None],
    }
