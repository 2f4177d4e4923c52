"""The rules by which a token is drawn are those of transformers, as arrays: a change of a number compiles nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from prb_jax.behaviour.generation.choose import Rules, _first_beyond, choose, filtered, first_largest

VOCABULARY = 97


def logits_and_seen(rows: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((1, rows, VOCABULARY)).astype(np.float32)
    logits[0, 0, :4] = logits[0, 0].max()  # a tie for the first place
    return logits, rng.random(logits.shape) < 0.2


RULES = (
    Rules(temperature=0.7),
    Rules(top_k=5),
    Rules(top_k=VOCABULARY + 9),
    Rules(top_p=0.8),
    Rules(top_p=1e-6),
    Rules(min_p=0.1),
    Rules(repetition_penalty=1.3),
    Rules(temperature=1.7, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
)


def theirs(rules: Rules, logits: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Log-probabilities of transformers' processors, row by row."""
    torch, t = pytest.importorskip("torch"), pytest.importorskip("transformers")
    logprobs = []
    for row, marks in zip(logits[0], seen[0], strict=True):
        ids, scores = torch.tensor(np.flatnonzero(marks))[None], torch.tensor(row)[None]
        scores = t.RepetitionPenaltyLogitsProcessor(float(rules.repetition_penalty))(ids, scores)
        scores = t.TemperatureLogitsWarper(float(rules.temperature))(ids, scores)
        if rules.top_k:
            scores = t.TopKLogitsWarper(min(int(rules.top_k), VOCABULARY))(ids, scores)
        scores = t.TopPLogitsWarper(float(rules.top_p))(ids, scores)
        scores = t.MinPLogitsWarper(float(rules.min_p))(ids, scores)
        logprobs.append(scores.log_softmax(-1)[0].numpy())
    return np.stack(logprobs)[None]


def test_rules_are_those_of_transformers_and_compile_once() -> None:
    logits, seen = logits_and_seen()
    program = jax.jit(filtered)
    for rules in RULES:
        kept = program(logits, seen, rules)
        ours, expected = np.asarray(jax.nn.log_softmax(kept)), theirs(rules, logits, seen)
        if rules.top_p < 1:  # of tokens that tie at the threshold transformers keeps some, we keep all
            ours, expected = ours[:, 1:], expected[:, 1:]
        same = np.isfinite(ours) == np.isfinite(expected)
        assert same.all(), rules
        np.testing.assert_allclose(ours[np.isfinite(expected)], expected[np.isfinite(expected)], atol=2e-5)
    assert program._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]


def test_draws_have_the_distribution_and_greedy_is_a_temperature() -> None:
    logits, seen = logits_and_seen(rows=1)
    size = 2000
    rules = Rules(temperature=np.full((1, size), 0.8), top_k=12)
    keys = jax.random.split(jax.random.key(3), (1, size))
    many = jnp.broadcast_to(logits, (1, size, VOCABULARY))
    marks = jnp.broadcast_to(seen, many.shape)
    chosen = jax.jit(choose)(many, keys, marks, rules)
    alone = Rules(temperature=0.8, top_k=12)
    probabilities = np.asarray(jax.nn.softmax(filtered(logits, seen, alone)), np.float64)[0, 0]
    tokens = np.asarray(chosen.token)[0]
    counts = np.bincount(tokens, minlength=VOCABULARY)
    assert not counts[probabilities == 0].any()
    kept = probabilities > 0
    expected = size * probabilities[kept] / probabilities[kept].sum()
    assert stats.chisquare(counts[kept], expected).pvalue > 0.01
    np.testing.assert_allclose(chosen.sampled_logprob[0], np.log(probabilities[tokens]), atol=1e-5)
    of_model = np.asarray(jax.nn.log_softmax(logits))[0, 0, tokens]
    np.testing.assert_allclose(chosen.logprob[0], of_model, atol=1e-5)
    mixed = dataclasses.replace(rules, temperature=jnp.where(jnp.arange(size) % 2, 0.8, 0.0)[None])
    half = jax.jit(choose)(many, keys, marks, mixed)
    assert (np.asarray(half.token)[0, ::2] == logits[0, 0].argmax()).all()
    np.testing.assert_array_equal(np.asarray(half.token)[0, 1::2], tokens[1::2])  # neighbours change nothing
    assert (np.asarray(half.sampled_logprob)[0, ::2] == 0).all()


def test_draws_over_many_blocks_never_take_what_a_rule_removed() -> None:
    likely = {3: 0.5, 127: 0.2, 128: 0.1, 700: 0.15, 999: 0.05}
    logits = np.full((1, 20_000, 1000), -20.0, np.float32)
    for token, probability in likely.items():
        logits[..., token] = np.log(probability)
    keys = jax.random.split(jax.random.key(1), 20_000)[None]
    seen = np.zeros(logits.shape, bool)
    token = np.asarray(choose(jnp.asarray(logits), keys, seen, Rules(min_p=0.01)).token)
    counts = [(token == wanted).sum() for wanted in likely]
    assert sum(counts) == token.size
    assert stats.chisquare(counts, [token.size * share for share in likely.values()]).pvalue > 0.01


def test_a_target_beyond_the_last_sum_takes_the_last_token_that_has_a_weight() -> None:
    weights = jnp.asarray([[0.0, 1.0, 0.0, 2.0, 0.0]])
    until = jnp.cumsum(weights, axis=-1)
    for target, expected in ((-0.1, 1), (0.0, 1), (1.0, 3), (3.0, 3), (3.1, 3)):
        assert int(_first_beyond(until, weights, jnp.asarray([target]))[0]) == expected


@pytest.mark.parametrize(
    "values", [[1.0, 3.0, 3.0, 2.0], [1.0, np.nan, 5.0, np.nan], [-np.inf, -np.inf, -np.inf]]
)
def test_the_first_largest_is_that_of_numpy(values: list[float]) -> None:
    assert int(first_largest(jnp.asarray(values))) == np.argmax(values)
