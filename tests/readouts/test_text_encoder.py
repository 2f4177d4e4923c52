"""Texts to vectors: tokens, truncation, batches, pooling, meshes; against transformers by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prb_jax.errors import CheckpointError, DataError, MeshError
from prb_jax.readouts.text_encoder import Pooling, batch_texts, load_text_encoder, read_pooling
from tests.tiny_encoders import WORDS, write_encoder

TOLERANCE = 1e-5


def texts(count: int, *, longest: int = 50, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS[:28], int(n))) for n in rng.integers(0, longest, count)]


def contriever(folder: Path, model, rows: list[str], *, max_length: int = 64) -> np.ndarray:
    """The vectors of one text after the other: the mean of the last states over the mask."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    vectors = []
    for text in rows:
        inputs = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][:, :, None]
        vectors.append(((states * mask).sum(1) / mask.sum(1))[0].numpy())
    return np.stack(vectors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    path = tmp_path_factory.mktemp("bert")
    return path, write_encoder(path)


def sentence_transformers(
    folder: Path, *, kinds=("Transformer", "Pooling", "Normalize"), pooling=None, **files
) -> None:
    """The files that sentence-transformers puts beside a model."""
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps(pooling or {"pooling_mode_mean_tokens": True})
    )
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_contriever_pooling_of_ragged_texts(folder: tuple[Path, object]) -> None:
    path, model = folder
    rows = [*texts(40), "", "soup " * 100, "soup " * 100, "zebra"]
    encoder = load_text_encoder(path)
    found = encoder.embed(rows)
    np.testing.assert_allclose(found.vectors, contriever(path, model, rows), atol=TOLERANCE, rtol=0)
    assert found.vectors.dtype == np.float32
    assert found.truncated.tolist() == [*[False] * 41, True, True, False]
    np.testing.assert_array_equal(found.vectors[-2], found.vectors[-3])
    assert encoder.embed([]).vectors.shape == (0, 32)
    # One program for each shape.
    assert encoder.embed_fn._cache_size() == len(found.shapes)  # pyright: ignore[reportFunctionMemberAccess]


def test_a_shorter_limit_cuts_the_end(folder: tuple[Path, object]) -> None:
    path, model = folder
    rows = texts(12)
    encoder = load_text_encoder(path, max_length=9)
    found = encoder.embed(rows)
    np.testing.assert_allclose(
        found.vectors, contriever(path, model, rows, max_length=9), atol=TOLERANCE, rtol=0
    )
    assert found.truncated.tolist() == [len(text.replace("?", " ?").split()) > 7 for text in rows]
    assert {length for _, length in found.shapes} == {9}


def test_bfloat16_is_near(folder: tuple[Path, object]) -> None:
    path, model = folder
    rows = texts(4, longest=9)
    found = load_text_encoder(path, dtype="bfloat16").embed(rows).vectors
    expected = contriever(path, model, rows)
    assert 1e-4 < np.abs(found - expected).max() < 0.3
    assert found.dtype == np.float32


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

    inputs = AutoTokenizer.from_pretrained(tmp_path)(
        rows, truncation=True, max_length=12, padding=True, return_tensors="pt"
    )
    with torch.inference_mode():
        states = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).last_hidden_state[:, 0]
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kinds": ("Transformer", "Pooling", "Dense")},
            r"modules\.json: .*found Transformer, Pooling, Dense",
        ),
        (
            {"pooling": {"pooling_mode_max_tokens": True}},
            r"1_Pooling/config\.json: field 'pooling_mode': .*'max'",
        ),
        (
            {"pooling": {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}},
            r"'pooling_mode': expected mean or cls, found \['mean', 'max'\]",
        ),
        (
            {"sentence_bert_config": {"max_seq_length": "x"}},
            r"'max_seq_length': expected a positive number, found 'x'",
        ),
        (
            {"config_sentence_transformers": {"similarity_fn_name": "euclidean"}},
            r"similarity_fn_name.*'euclidean'",
        ),
        ({"config_sentence_transformers": {"default_prompt_name": "query"}}, r"default_prompt_name.*'query'"),
        ({"sentence_bert_config": [1]}, r"sentence_bert_config\.json: expected a JSON object, found list"),
    ],
)
def test_pooling_that_is_refused(changes: dict, message: str, tmp_path: Path) -> None:
    sentence_transformers(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_pooling(tmp_path)


def test_encoders_that_are_refused(folder: tuple[Path, object], tmp_path: Path) -> None:
    path, _ = folder
    with pytest.raises(
        DataError, match=r"max_length 65 is more than the 64 tokens \(max_position_embeddings\)"
    ):
        load_text_encoder(path, max_length=65)
    with pytest.raises(DataError, match="max_length 2 leaves no room beside the 2 special tokens"):
        load_text_encoder(path, max_length=2)
    with pytest.raises(CheckpointError, match="dtype: expected float32 or bfloat16, found 'int8'"):
        load_text_encoder(path, dtype="int8")
    with pytest.raises(MeshError, match="takes 3 devices"):
        load_text_encoder(path, mesh="data=3")
    write_encoder(tmp_path, vocab_size=20)
    with pytest.raises(CheckpointError, match=r"token id \d+, but there are only 20 embeddings"):
        load_text_encoder(tmp_path).embed(["soup", WORDS[20]])
    for file in tmp_path.glob("token*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_text_encoder(tmp_path)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(1, 700), max_size=300), st.integers(1, 4), st.integers(64, 4096), st.integers(0, 300)
)
def test_every_text_is_in_one_batch_that_holds_it(
    lengths: list[int], divisor: int, budget: int, slack: int
) -> None:
    limit = max(lengths, default=1) + slack
    dealt = batch_texts(lengths, limit=limit, tokens=budget, divisor=divisor)
    assert sorted(index for batch in dealt for index in batch.members) == list(range(len(lengths)))
    padded_to = [batch.bucket.tokens for batch in dealt]
    for batch, length in zip(dealt, padded_to, strict=True):
        assert 0 < len(batch.members) <= batch.rows
        assert batch.rows % divisor == 0
        assert length <= limit
        assert batch.rows == divisor or batch.rows * length <= budget
        assert max(lengths[index] for index in batch.members) <= length
    assert sum(len(batch.members) < batch.rows for batch in dealt) <= 1
    assert len({(batch.rows, length) for batch, length in zip(dealt, padded_to, strict=True)}) == len(
        set(padded_to)
    )
    assert padded_to == sorted(padded_to, reverse=True)


@pytest.mark.slow
def test_the_same_vectors_on_a_mesh(folder: tuple[Path, object], tmp_path: Path) -> None:
    path, model = folder
    rows = texts(24)
    (tmp_path / "texts.json").write_text(json.dumps(rows))
    out = tmp_path / "vectors.npy"
    code = (
        "import jax, json, sys, numpy as np\n"
        "jax.config.update('jax_num_cpu_devices', 8)\n"
        "from prb_jax.readouts.text_encoder import load_text_encoder\n"
        "model, texts, out = sys.argv[1:]\n"
        "encoder = load_text_encoder(model, mesh='data=2,fsdp=2,tensor=2')\n"
        "found = encoder.embed(json.load(open(texts)))\n"
        "assert all(rows % 4 == 0 for rows, _ in found.shapes)\n"
        "assert encoder.params['layers']['q'].sharding.shard_shape((3, 32, 32)) == (3, 16, 16)\n"
        "np.save(out, found.vectors)\n"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "texts.json"), str(out)]
    subprocess.run(command, check=True, timeout=300)
    np.testing.assert_allclose(np.load(out), contriever(path, model, rows), atol=TOLERANCE, rtol=0)
