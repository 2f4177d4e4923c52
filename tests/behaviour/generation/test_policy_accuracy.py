"""`prb policy-accuracy`: scores are those of transformers and of the formulas in full; the controls are right."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.generation.policy_accuracy import policy_accuracy
from prb_jax.behaviour.generation.token_scores import read_policy, read_rewards
from prb_jax.metrics.policy_scores import TokenFacts, prefix_sizes, response_scores
from prb_jax.text.prompts import encode_prompts
from tests.json_lines import read_lines
from tests.tiny_policies import VOCABULARY, write_policy

LAMBDAS = (0.0, 0.7, 3.0)


@pytest.fixture(scope="module")
def capped(tmp_path_factory) -> Path:
    """A policy with sliding windows and capped logits."""
    folder = tmp_path_factory.mktemp("policy")
    write_policy(folder, "gemma2", eos=3, num_hidden_layers=2)
    return folder


def logits(model: Any, ids: np.ndarray) -> np.ndarray:
    """What transformers gives for sequences [N, T] of one length: [N, T, V] or [N, labels]."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(ids.astype(np.int64))).logits.numpy()


def rewards_of_all_tokens(judge: Any, before: np.ndarray) -> np.ndarray:
    """What transformers gives for `before` with each token of the vocabulary behind it, [V]; `before` is read once."""
    import torch

    with torch.no_grad():
        cache = judge.model(torch.from_numpy(before[None].astype(np.int64)), use_cache=True).past_key_values
        cache.batch_repeat_interleave(VOCABULARY)
        states = judge.model(torch.arange(VOCABULARY)[:, None], past_key_values=cache).last_hidden_state
        return judge.score(states)[:, -1, 0].numpy()


def test_tokens_equal_transformers_and_the_formula_in_full(folder, capped, model, comparisons):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    language = transformers.AutoModelForCausalLM.from_pretrained(capped).eval()
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "rm").eval()
    judge.config.pad_token_id = -1  # every token is read where it stands last, the padding token too
    policy, comparison = prb.load_policy(capped), comparisons[0]
    (tokens,) = read_policy(policy, [comparison], profile_posts=0, candidates=VOCABULARY, limit=200)
    (known,) = read_rewards(model, [comparison], [tokens], [np.asarray([2.5, 2.5])])
    prompt = encode_prompts(policy.tokenizer, [comparison.prompt])[0]
    shown = policy.encode([comparison], profile_posts=1, limit=500)[0].ids
    assert len(shown) > len(prompt)  # the reward model sees the profile
    assert len(tokens.ids[0]) * VOCABULARY > 8_192  # a stream holds some of the candidates alone
    for k, ids in enumerate(tokens.ids):
        assert policy.decode(ids) == comparison.responses[k]
        all_logits = logits(language, np.concatenate([prompt, ids])[None])[0][len(prompt) - 1 : -1]
        logprobs = all_logits - np.logaddexp.reduce(all_logits.astype(np.float64), axis=1)[:, None]
        expected = np.take_along_axis(logprobs, ids[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(tokens.logprobs[k], expected, atol=1e-5)
        full = np.stack(
            [rewards_of_all_tokens(judge, np.concatenate([shown, ids[:t]])) for t in range(len(ids))]
        )
        facts = known[k]
        np.testing.assert_allclose(facts.rewards, full[np.arange(len(ids)), ids], atol=1e-5)
        expected_rewards = np.take_along_axis(full, tokens.tried[k], axis=1)
        np.testing.assert_allclose(facts.tried_rewards, expected_rewards, atol=1e-5)
        assert facts.start == pytest.approx(float(logits(judge, shown[None])[0, 0]), abs=1e-5)
        for strength in LAMBDAS:
            scores = response_scores(facts, strength)
            tilted = logprobs + strength * full
            by_token = np.take_along_axis(tilted, ids[:, None], axis=1)[:, 0]
            step = by_token - np.logaddexp.reduce(tilted, axis=1)
            sizes = np.array(prefix_sizes(len(ids))) - 1
            for name in ("seq_logprob", "seq_logprob_topk"):  # with all tokens tried there is no difference
                np.testing.assert_allclose(scores[name], np.cumsum(step)[sizes], atol=1e-4)
            np.testing.assert_allclose(scores["token_score_sum"], np.cumsum(by_token)[sizes], atol=1e-4)
            assert scores["seq_score"][-1] == pytest.approx(expected.sum() + strength * 2.5, abs=1e-4)


def test_scores_of_few_candidates():
    """By hand: two steps, one candidate each; the rest of the vocabulary has the reward of the text before it."""
    facts = TokenFacts(
        logprobs=np.log([0.5, 0.2]), reward=1.0, rewards=np.array([2.0, -1.0]), start=0.5,
        tried_logprobs=np.log([[0.5], [0.6]]), tried_rewards=np.array([[2.0], [3.0]]), listed=np.array([True, False]),
    )  # fmt: skip
    scores = response_scores(facts, 1.0)
    first = np.log(0.5 * np.exp(2) / (0.5 * np.exp(2) + 0.5 * np.exp(0.5)))
    second = np.log(0.2 * np.exp(-1) / (0.6 * np.exp(3) + 0.2 * np.exp(-1) + 0.2 * np.exp(2)))
    assert scores["seq_logprob"][-1] == pytest.approx(first + second)
    assert scores["seq_logprob_topk"][-1] == pytest.approx(
        np.log(0.2 * np.exp(-1) / (0.6 * np.exp(3) + 0.2 * np.exp(-1)))
    )
    assert scores["token_score_sum"][-1] == pytest.approx(np.log(0.1) + 1)
    assert scores["seq_score"] == pytest.approx([np.log(0.5) + 2] * 3 + [np.log(0.1) - 1, np.log(0.1) + 1])
    for name in ("seq_logprob", "token_score_sum", "seq_score"):
        assert response_scores(facts, 0.0)[name][-1] == np.log([0.5, 0.2]).sum()
    assert response_scores(TokenFacts(np.log([0.5]), 2.0), 3.0) == {
        "seq_score": [None] * 4 + [np.log(0.5) + 6]
    }


def test_the_implicit_reward_of_a_policy_is_a_reward(folder, policy, comparisons, tmp_path):
    write_policy(tmp_path / "trained", "qwen3", eos=3, num_hidden_layers=2, seed=5)
    trained, base, out = str(tmp_path / "trained"), str(folder / "policy"), tmp_path / "out"
    command = [
        "policy-accuracy", base, "--rewards", trained, "--reference", base, "--beta", "0.5", "--lambdas", "2",
        "--data", str(folder / "pairs.jsonl"), "--out", str(out), "--candidates", "0", "--score", "seq_score",
        "--no-progress",
    ]  # fmt: skip
    assert cli.main(command) == 0
    rows = {row["id"]: row for row in read_lines(out / "rows.jsonl") if not row["control"]}
    expected = prb.load(trained, reference=base, beta=0.5).score(comparisons)
    for comparison, rewards in zip(comparisons, expected, strict=True):
        np.testing.assert_allclose(rows[comparison.id]["rewards"], rewards, atol=1e-5)
    summary = json.loads((out / "summary.json").read_text())["rewards"][trained]
    assert summary["token_level"] == "it rewards only whole responses"
    assert list(summary["scores"]) == ["seq_score", "seq_score_lennorm"]


@pytest.mark.slow
def test_a_run_of_two_reward_models(folder, capped, tmp_path, capsys):
    out, model, data = tmp_path / "out", str(folder / "rm"), str(folder / "pairs.jsonl")
    command = [
        "policy-accuracy", str(capped), "--rewards", model, "baseline:length", "--data", data,
        "--out", str(out), "--candidates", "3", "--lambdas", "0.5,2", "--no-progress",
    ]  # fmt: skip
    assert cli.main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no rewards of tokens: it is no reward model with weights" in shown
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["n"], summary["users"], summary["users_validation"]) == (8, 4, 1)
    assert summary["strengths"] == [0.0, 0.5, 2.0]
    rows = read_lines(out / "rows.jsonl")
    of_model = [row for row in rows if row["scorer"] == model]
    assert [row["control"] for row in of_model] == [""] * 8 + ["swap"] * 8
    # lambda 0 is the policy alone, exactly, in every score but the one that is normalised over the candidates
    for row in of_model:
        base = row["scores"]["seq_score"][0]
        assert row["scores"]["seq_logprob"][0] == row["scores"]["token_score_sum"][0] == base
    shown_own, shown_other = (of_model[place]["scores"]["seq_score"] for place in (0, 8))
    assert shown_own[0] == shown_other[0]
    assert shown_own[1] != shown_other[1]
    # the reward alone is that of `prb evaluate`, on the users of the test part
    scored = prb.evaluate(model, data, out=tmp_path / "scores", progress=False)
    rewards = [row["rewards"] for row in of_model[:8]]
    np.testing.assert_allclose(rewards, [row.scores for row in scored.rows], atol=1e-6)
    scores, of_length = summary["rewards"][model]["scores"], summary["rewards"]["baseline:length"]
    assert len(scores) == 8
    assert list(of_length["scores"]) == ["seq_score", "seq_score_lennorm"]
    assert of_length["headline"] == "seq_score"
    at_0 = {scores[name]["curve"][0]["test"] for name in ("seq_logprob", "token_score_sum")}
    assert at_0 == {summary["lambda_0"]["sum"]["policy_accuracy"]}
    assert summary["n_test"] == 6
    figures = json.loads((out / "behaviour.json").read_text())["figures"]
    assert [figure["label"] for figure in figures] == [model, "baseline:length"]
    assert [sum(figure["counts"]) for figure in figures] == [6, 6]
    # a model without rewards of tokens has another score, and a figure of another name
    names = ["policy accuracy (seq_logprob)", "policy accuracy (seq_score)"]
    assert [figure["name"] for figure in figures] == names
    best = scores["seq_logprob"]
    assert sum(figures[0]["sums"]) / 6 == pytest.approx(best["policy_accuracy"])
    assert best["prefixes"]["1.0"] == pytest.approx(best["policy_accuracy"])

    options: dict[str, Any] = {"out": out, "candidates": 3, "strengths": (2, 0.5), "progress": False}
    with pytest.raises(prb.RunError, match="candidates: 3 -> 4"):
        policy_accuracy(capped, [model, "baseline:length"], data, **{**options, "candidates": 4})


def test_choices_that_cannot_be(folder, tmp_path):
    data, out = str(folder / "pairs.jsonl"), tmp_path / "out"
    wrong: dict[str, dict[str, Any]] = {
        "lambdas: expected finite numbers of at least 0": {"strengths": (-1,)},
        "score: expected one of .*, found 'best'": {"score": "best"},
        "score: expected one of token_score_sum": {"candidates": 0},
        "validation: expected a share": {"validation": 1.0},
        "expected at least two users": {"limit": 1},
    }
    for message, choice in wrong.items():
        with pytest.raises(prb.DataError, match=message):
            policy_accuracy("unread", ["baseline:length"], data, out=out, progress=False, **choice)
