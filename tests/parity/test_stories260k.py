"""Trained weights: their greedy continuation through our decoder is the documented text."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import decode_stream
from prb_jax.models.model import bind
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.trees.streams import StreamOptions
from prb_jax.trees.tree import build_tree
from tests.packed import packed_batch
from tests.parity.oracle import transformers_scores
from tests.parity.stories260k import BOS, read_pieces, write_model

SOURCE = Path(__file__).resolve().parents[2].parent / "shared" / "weights" / "stories260K"
TOKENS, LENGTH = 256, 384
DIGEST = "30b2ffb07967932a88bfdf5e23b517a6f4cfcf7231db9e537360d3c12a4e4d10"  # of the documented text


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> RewardModel:
    if not SOURCE.is_dir():
        pytest.skip(f"no trained weights at {SOURCE}")
    return prb.load(write_model(SOURCE, tmp_path_factory.mktemp("stories") / "model"))


@functools.cache
def _program(config: DecoderConfig) -> Callable[..., jax.Array]:
    @jax.jit
    def logits(params, batch):
        decoder = bind(config, params)
        normed = decoder.normed(decode_stream(decoder, batch, dtype=jnp.float32, reads_only=False)[0])
        return jnp.dot(normed, params["embed"].T, precision="highest")  # the output matrix is the embedding

    return logits


def logits_of(model: RewardModel, ids: Sequence[int]) -> np.ndarray:
    """float32 [tokens, V], of each place of a conversation; all have one shape."""
    batch = packed_batch([build_tree([ids])], options=StreamOptions(tokens=LENGTH, block=LENGTH))
    return np.asarray(_program(model.config)(model.params, batch))[: len(ids)]


@pytest.fixture(scope="module")
def greedy(model: RewardModel) -> tuple[list[int], np.ndarray]:
    """256 ids after BOS, and the logits that chose each of them, float32 [256, V].

    The growing sequence is computed anew for every token.
    """
    ids, rows = [BOS], []
    for _ in range(TOKENS):
        rows.append(logits_of(model, ids)[-1])
        ids.append(int(rows[-1].argmax()))
    return ids[1:], np.stack(rows)


def test_the_continuation_is_the_documented_text(greedy) -> None:
    ids, _ = greedy
    assert ids[:6] == [403, 407, 261, 378, 432, 383]
    assert ids[-4:] == [421, 427, 364, 426]
    pieces = read_pieces(SOURCE / "tok512.bin")
    told = b"".join(pieces[number] for number in ids).removeprefix(b" ")
    assert told == (SOURCE / "greedy.txt").read_bytes()
    assert hashlib.sha256(told).hexdigest() == DIGEST


def test_its_logits_are_the_documented_ones(greedy) -> None:
    ids, logits = greedy
    assert logits[0].max() == pytest.approx(17.0235152, abs=1e-5)
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    nll = np.log(np.exp(wide - top[:, None]).sum(1)) + top - wide[np.arange(TOKENS), ids]
    assert nll.mean() == pytest.approx(0.4573462, abs=1e-6)
    second = np.sort(wide, axis=1)[:, -2]
    assert (top - second).min() == pytest.approx(0.0042, abs=1e-4)


def test_one_forward_over_the_whole_text_chooses_the_same(model: RewardModel, greedy) -> None:
    """Every place of a conversation at once predicts what came out one by one."""
    ids, logits = greedy
    at_once = logits_of(model, [BOS, *ids[:-1]])
    np.testing.assert_allclose(at_once, logits, atol=2e-4)
    assert at_once.argmax(1).tolist() == ids


def test_its_tokenizer_reads_the_text_back(model: RewardModel, greedy) -> None:
    """Merges in the order of the pieces give ids that spell the text; known words are single tokens."""
    told = (SOURCE / "greedy.txt").read_text()
    tokenizer = model.tokenizer.tokenizer
    ids = tokenizer(told)["input_ids"]
    assert ids[0] == BOS
    assert ids[1:7] == [403, 407, 261, 378, 432, 383]
    assert tokenizer.decode(ids, skip_special_tokens=True) == told
    assert tokenizer.decode(tokenizer("Käse ✓")["input_ids"], skip_special_tokens=True) == "Käse ✓"


def test_scores_equal_transformers(model: RewardModel) -> None:
    told = (SOURCE / "greedy.txt").read_text()
    first, *rest = re.split(r"(?<=\.) ", told.replace("\n", " "))
    comparison = prb.Comparison(id="story", question=first, responses=rest[:4], labels=None)
    (tree,), (scores,) = model.encode([comparison]), model.score([comparison])
    alone = transformers_scores(Path(model.name), [tree.sequence(k).tolist() for k in range(4)])[:, 0]
    np.testing.assert_allclose(scores, alone, atol=2e-5)
    assert np.ptp(scores) > 0.1


def test_its_quantised_scores_follow_those_of_float32(model: RewardModel) -> None:
    """A trained model of width 64: eight bits cost it more than models of thousands."""
    lines = (SOURCE / "greedy.txt").read_text().split(". ")
    items = [
        prb.Comparison(id=str(i), question=line, responses=lines[i + 1 : i + 3], labels=None)
        for i, line in enumerate(lines[:-2])
    ]
    plain = np.concatenate(model.score(items))
    for form, least in (("int8-weights", 0.995), ("int8", 0.98)):
        narrow = np.concatenate(prb.load(model.name, quantize=form).score(items))
        assert least < np.corrcoef(narrow, plain)[0, 1] < 1, form
        assert np.abs(narrow - plain).max() > 1e-3
