"""`prb guide --chunk`: weight 0 is the policy, the best candidate is kept, and a text depends on nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.errors import DataError
from prb_jax.generation import chunk_caches
from prb_jax.generation.guided import Guide
from prb_jax.generation.rules import SampleOptions
from prb_jax.generation.schedule import Drawn
from prb_jax.scoring.reward_model import RewardModel
from tests.json_lines import write_lines
from tests.scoring.records import write_model
from tests.tiny_policies import write_policy

OPTIONS = SampleOptions(n=2, temperature=1.0, max_new_tokens=7)


class Letters:
    """A reward model that counts a letter, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[prb.Comparison] = []

    def score(self, comparisons: Sequence[prb.Comparison]) -> list[np.ndarray]:
        self.asked += comparisons
        return [np.asarray([text.count("e") for text in one.responses], np.float32) for one in comparisons]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy and three comparisons."""
    top = tmp_path_factory.mktemp("chunks")
    write_policy(top / "policy", "qwen3", eos=3, num_hidden_layers=1)
    rows = [
        {"id": f"q{k}", "user_id": f"u{k}", "question": f"Question {k}", "chosen": "A quick soup.", "rejected": "No."}
        for k in range(3)
    ]  # fmt: skip
    write_lines(top / "pairs.jsonl", rows)
    return top


def test_the_best_chunk_is_kept_each_time(folder: Path) -> None:
    policy = prb.load_policy(folder / "policy")
    comparisons = list(prb.read_comparisons(str(folder / "pairs.jsonl")))
    prompts = policy.encode(comparisons, profile_posts=0, limit=200)

    def drawn(weight: float, model: Any, options: SampleOptions = OPTIONS, **more: Any) -> dict[Any, Drawn]:
        guide = Guide(model=cast(RewardModel, model), weight=weight, candidates=3, chunk=3).checked(policy)
        batches = guide.draw(policy, comparisons, prompts, options, **more)
        return {(one.prompt, one.sample): one for batch in batches for one in batch}

    model = Letters()
    found = drawn(1e6, model)
    assert found.keys() == {(prompt, sample) for prompt in range(3) for sample in range(2)}
    best: dict[str, set[str]] = {}
    for (
        one
    ) in model.asked:  # of every three candidates the one with most letters goes on, equal ones by chance
        top = max(text.count("e") for text in one.responses)
        best.setdefault(one.id, set()).update(text for text in one.responses if text.count("e") == top)
        assert (one.labels, one.profile) == (None, ())
    for (prompt, _), one in found.items():
        assert policy.decode(one.tokens) in best[comparisons[prompt].id]
        assert len(one.tokens) == len(one.logprobs) == len(one.sampled_logprobs)
        assert (one.finish, len(one.tokens)) == ("length", 7) or one.tokens[-1] == 3
        whole = policy.program.config.vocab_size
        assert ((one.tokens >= 0) & (one.tokens < whole)).all()
    again = drawn(1e6, Letters(), rows=1)
    for key, one in found.items():
        np.testing.assert_array_equal(one.tokens, again[key].tokens)
        np.testing.assert_allclose(one.logprobs, again[key].logprobs, atol=1e-5)
    plain = {(one.prompt, one.sample): one for batch in policy.draw(prompts, OPTIONS) for one in batch}
    for key, one in drawn(0.0, None).items():
        np.testing.assert_array_equal(one.tokens, plain[key].tokens)
    stop = policy.decode(found[0, 0].tokens[2:5])  # over the end of the first chunk
    if stop.strip():
        cut = drawn(1e6, Letters(), SampleOptions(n=2, temperature=1.0, max_new_tokens=7, stop=(stop,)))
        assert (cut[0, 0].finish, stop in policy.decode(cut[0, 0].tokens)) == ("text", True)
    with pytest.raises(DataError, match="temperature: expected more than 0"):
        drawn(1.0, Letters(), SampleOptions(temperature=0.0))
    with pytest.raises(DataError, match="chunk: expected 1 or more"):
        Guide(model=cast(RewardModel, model), weight=1.0, candidates=3, chunk=0).checked(policy)


def test_a_negative_weight_keeps_no_chunk_without_a_word(folder: Path) -> None:
    """Nothing is known of the reward of such a chunk, so that it is never the best one."""
    policy = prb.load_policy(folder / "policy")
    guide = Guide(model=Letters(), weight=-1e6, candidates=3, chunk=3)
    values = np.asarray([-np.inf, 2.0, 1.0])
    assert [guide.best(values, np.zeros(3)), replace(guide, weight=1e6).best(values, np.zeros(3))] == [2, 1]
    comparisons = list(prb.read_comparisons(str(folder / "pairs.jsonl")))[:1]
    prompts = policy.encode(comparisons, profile_posts=0, limit=200)
    found = [one for batch in guide.draw(policy, comparisons, prompts, OPTIONS) for one in batch]
    assert all(policy.decode(one.tokens).strip() for one in found)


class Noted:
    """Keeps the rewards of the responses of each text."""

    def __init__(self, model: RewardModel) -> None:
        self.model, self.rewards = model, list[np.ndarray]()

    def score(self, comparisons: Sequence[prb.Comparison]) -> list[np.ndarray]:
        found = self.model.score(comparisons)
        self.rewards += found
        return found


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_caches_give_what_reading_again_gives(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Tokens, log-probabilities and rewards, with a reward model of windows and with a profile in view."""
    policy = prb.load_policy(folder / "policy")
    model = prb.load(write_model(tmp_path / "rm", family, num_hidden_layers=2))
    profile = [{"id": "p", "category": "", "text": "I like walks and tea."}]
    comparisons = [
        prb.Comparison(id=f"q{k}", question=f"Question {k}?", responses=["-"], profile=profile)
        for k in (1, 2)
    ]
    prompts = policy.encode(comparisons, profile_posts=1, limit=200)
    options = SampleOptions(n=1, temperature=1.0, max_new_tokens=12)
    read: list[np.ndarray] = []
    score = chunk_caches.RewardCaches.score

    def noted(self: Any, *given: Any, **more: Any) -> list[np.ndarray]:
        found = score(self, *given, **more)
        read.extend(found)
        return found

    monkeypatch.setattr(chunk_caches.RewardCaches, "score", noted)
    guide = Guide(model=model, weight=200.0, candidates=3, chunk=4)
    found = [one for batch in guide.draw(policy, comparisons, prompts, options, rows=3) for one in batch]
    again = Noted(model)
    for number, one in enumerate(found):
        text = np.zeros(0, np.int32)
        logprobs: list[np.ndarray] = []
        for chunk in range(3):
            seed = int(np.random.SeedSequence([0, chunk]).generate_state(1)[0] >> 1)
            drawing = SampleOptions(n=3, temperature=1.0, max_new_tokens=4, seed=seed)
            longer = [replace(prompts[number], ids=np.concatenate([prompts[number].ids, text]))]
            drawn = [each for part in policy.draw(longer, drawing, numbers=[number]) for each in part]
            drawn.sort(key=lambda each: each.sample)
            texts = [policy.decode(np.concatenate([text, each.tokens])) for each in drawn]
            asked = list(dict.fromkeys(each for each in texts if each.strip()))
            rewards = dict.fromkeys(texts, -np.inf)
            rewards |= dict(
                zip(asked, again.score([replace(comparisons[number], responses=asked)])[0], strict=True)
            )
            noise = np.random.default_rng([0, number, 4 * (chunk + 1)]).gumbel(size=3)
            kept = drawn[int(np.argmax([200.0 * rewards[each] for each in texts] + noise))]
            text, logprobs = np.concatenate([text, kept.tokens]), [*logprobs, kept.logprobs]
            if kept.finish == "stop":
                break
        np.testing.assert_array_equal(one.tokens, text)
        np.testing.assert_allclose(one.logprobs, np.concatenate(logprobs), atol=1e-5)
    assert len(read) == len(again.rewards) > 2
    for ours, theirs in zip(read, again.rewards, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_run_says_what_guided_it_and_goes_on(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "rm", "qwen3", num_hidden_layers=1)
    given: dict[str, Any] = {
        "weight": 2.0,
        "candidates": 2,
        "chunk": 3,
        "options": OPTIONS,
        "progress": False,
    }

    def run() -> dict[str, Any]:
        policy, model, data = folder / "policy", tmp_path / "rm", str(folder / "pairs.jsonl")
        return prb.guide(policy, model, data, out=tmp_path / "run", **given).summary

    summary = run()
    assert (summary["chunk"], summary["candidates"], summary["samples"]) == (3, 2, 2)
    behaviour = json.loads((tmp_path / "run" / "behaviour.json").read_text())
    assert behaviour["figures"][0]["setting"]["chunk"] == 3
    before = (tmp_path / "run" / "samples.jsonl").read_bytes()
    (tmp_path / "run" / "samples.jsonl").write_bytes(before[: before.index(b"\n") + 20])
    assert run()["n"] == 3
    assert (tmp_path / "run" / "samples.jsonl").read_bytes() == before
    with pytest.raises(DataError, match="chunk: the policy alone has no chunks"):
        prb.guide(folder / "policy", None, str(folder / "pairs.jsonl"), out=tmp_path / "none", chunk=3)
