"""Texts to vectors: tokens, truncation, batches, pooling, meshes; against transformers by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from prb_jax.errors import CheckpointError, DataError, MeshError
from prb_jax.models.readouts.text_encoder import Pooling, load_text_encoder, read_pooling
from prb_jax.trees import sequences
from tests.tiny_encoders import WORDS, write_encoder

TOLERANCE = 1e-5


def texts(count: int, *, longest: int = 50, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS[:28], int(n))) for n in rng.integers(0, longest, count)]


def contriever(folder: Path, model, rows: list[str], max_length: int = 64, *, batch: int = 1) -> np.ndarray:
    """The vectors of texts, some at a time: the mean of the last states over the mask."""
    from transformers import AutoTokenizer

    tokenizer, vectors = AutoTokenizer.from_pretrained(folder), []
    for start in range(0, len(rows), batch):
        texts = rows[start : start + batch]
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][:, :, None]
        vectors.append((states * mask).sum(1) / mask.sum(1))
    return torch.cat(vectors).numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("bert")
    return path, write_encoder(path)


def sentence_transformers(
    folder: Path, *, kinds=("Transformer", "Pooling", "Normalize"), pooling=None, **files
) -> None:
    """The files that sentence-transformers puts beside a model."""
    files["modules"] = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    files["1_Pooling/config"] = pooling or {"pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_contriever_pooling_of_ragged_texts(folder: tuple[Path, Any]) -> None:
    path, model = folder
    rows = [*texts(40), "", "soup " * 100, "soup " * 100, "zebra"]
    encoder = load_text_encoder(path)
    embedded = encoder.embed(rows)
    np.testing.assert_allclose(embedded.vectors, contriever(path, model, rows), atol=TOLERANCE, rtol=0)
    assert embedded.vectors.dtype == np.float32
    assert embedded.truncated.tolist() == [*[False] * 41, True, True, False]
    np.testing.assert_array_equal(embedded.vectors[-2], embedded.vectors[-3])
    assert encoder.embed([]).vectors.shape == (0, 32)
    # One program for each shape.
    assert encoder.embed_fn._cache_size() == len(embedded.shapes)  # pyright: ignore[reportFunctionMemberAccess]


def test_a_shorter_limit_cuts_the_end(folder: tuple[Path, Any]) -> None:
    path, model = folder
    rows = texts(12)
    embedded, expected = load_text_encoder(path, max_length=9).embed(rows), contriever(path, model, rows, 9)
    np.testing.assert_allclose(embedded.vectors, expected, atol=TOLERANCE, rtol=0)
    assert embedded.truncated.tolist() == [len(text.replace("?", " ?").split()) > 7 for text in rows]
    assert {length for _, length in embedded.shapes} == {9}


def test_bfloat16_is_near(folder: tuple[Path, Any]) -> None:
    path, model = folder
    rows = texts(4, longest=9)
    vectors = load_text_encoder(path, dtype="bfloat16").embed(rows).vectors
    assert 1e-4 < np.abs(vectors - contriever(path, model, rows)).max() < 0.3
    assert vectors.dtype == np.float32


def test_what_sentence_transformers_says(tmp_path: Path) -> None:
    model = write_encoder(tmp_path)
    sentence_transformers(
        tmp_path,
        pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        sentence_bert_config={"max_seq_length": 12, "do_lower_case": True},
    )
    encoder = load_text_encoder(tmp_path)
    assert (encoder.max_length, encoder.pooling.mode) == (12, "cls")
    rows = ["Soup RAIN tea", "the " * 30]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    inputs = tokenizer(rows, truncation=True, max_length=12, padding=True, return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.inference_mode():
        states = model(**inputs).last_hidden_state[:, 0]
    expected = torch.nn.functional.normalize(states, dim=-1).numpy()
    np.testing.assert_allclose(encoder.embed(rows).vectors, expected, atol=TOLERANCE, rtol=0)


def test_newer_files_of_sentence_transformers(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling()
    sentence_transformers(
        tmp_path,
        kinds=("Transformer", "Pooling"),
        pooling={"pooling_mode": "mean"},
        config_sentence_transformers={"similarity_fn_name": "cosine"},
    )
    assert read_pooling(tmp_path) == Pooling(normalised=True)


TWO_MODES = {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("kinds", ("Transformer", "Pooling", "Dense"), r"modules\.json: .*found Transformer, Pooling, Dense"),
        (
            "pooling",
            {"pooling_mode_max_tokens": True},
            r"1_Pooling/config\.json: field 'pooling_mode': .*'max'",
        ),
        ("pooling", TWO_MODES, r"'pooling_mode': expected mean or cls, found \['mean', 'max'\]"),
        (
            "sentence_bert_config",
            {"max_seq_length": "x"},
            "'max_seq_length': expected a positive number, found 'x'",
        ),
        (
            "config_sentence_transformers",
            {"similarity_fn_name": "euclidean"},
            "similarity_fn_name.*'euclidean'",
        ),
        (
            "config_sentence_transformers",
            {"similarity_fn_name": ["cosine"]},
            "similarity_fn_name.*'cosine'",
        ),
        ("config_sentence_transformers", {"default_prompt_name": "query"}, "default_prompt_name.*'query'"),
        ("sentence_bert_config", [1], r"sentence_bert_config\.json: expected a JSON object, found list"),
    ],
)
def test_pooling_that_is_refused(file: str, content: Any, message: str, tmp_path: Path) -> None:
    sentence_transformers(tmp_path, **{file: content})
    with pytest.raises(CheckpointError, match=message):
        read_pooling(tmp_path)


def test_encoders_that_are_refused(folder: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = folder
    for option, error, message in (
        (
            {"max_length": 65},
            DataError,
            r"max_length 65 is more than the 64 tokens \(max_position_embeddings\)",
        ),
        ({"max_length": 2}, DataError, "max_length 2 leaves no room beside the 2 special tokens"),
        ({"dtype": "int8"}, CheckpointError, "dtype: expected float32 or bfloat16, found 'int8'"),
        ({"mesh": "data=3"}, MeshError, "takes 3 devices"),
    ):
        with pytest.raises(error, match=message):
            load_text_encoder(path, **option)
    write_encoder(tmp_path, vocab_size=20)
    with pytest.raises(CheckpointError, match=r"token id \d+, but there are only 20 embeddings"):
        load_text_encoder(tmp_path).embed(["soup", WORDS[20]])
    for file in tmp_path.glob("token*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_text_encoder(tmp_path)


@pytest.mark.parametrize(("flops", "shapes", "padding"), [(0.0, 8, 1.2), (1e11, 1, 2.1)])
def test_many_texts_take_few_programs(
    flops: float, shapes: int, padding: float, folder: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer where a program costs more: for this tiny model, as much as millions of tokens."""
    monkeypatch.setitem(sequences.PROGRAM_FLOPS, "cpu", flops)
    encoder = load_text_encoder(folder[0])
    embedded = encoder.embed(texts(600, longest=62, seed=3))
    assert cast(Any, encoder.embed_fn)._cache_size() == len(embedded.shapes) <= shapes
    assert embedded.padded_tokens < padding * embedded.tokens
    some = encoder.embed(texts(9, seed=4))
    assert all(rows * length <= 1_024 for rows, length in some.shapes)


@pytest.mark.slow
def test_the_same_vectors_on_a_mesh(folder: tuple[Path, Any], tmp_path: Path) -> None:
    path, model = folder
    rows = texts(24)
    (tmp_path / "texts.json").write_text(json.dumps(rows))
    out = tmp_path / "vectors.npy"
    code = (
        "import jax, json, sys, numpy as np\n"
        "jax.config.update('jax_num_cpu_devices', 8)\n"
        "from prb_jax.models.readouts.text_encoder import load_text_encoder\n"
        "model, texts, out = sys.argv[1:]\n"
        "encoder = load_text_encoder(model, mesh='data=2,fsdp=2,tensor=2')\n"
        "embedded = encoder.embed(json.load(open(texts)))\n"
        "assert all(rows % 4 == 0 for rows, _ in embedded.shapes)\n"
        "assert encoder.params['layers']['q'].sharding.shard_shape((3, 32, 32)) == (3, 16, 16)\n"
        "np.save(out, embedded.vectors)\n"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "texts.json"), str(out)]
    subprocess.run(command, check=True, timeout=300)
    np.testing.assert_allclose(np.load(out), contriever(path, model, rows), atol=TOLERANCE, rtol=0)
