"""`prb guide --chunk`: weight 0 is the policy, the best candidate is kept, and a text depends on nothing else."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.behaviour.generation import chunk_caches
from prb_jax.behaviour.generation.guided import Guide
from prb_jax.behaviour.generation.programs import make_programs
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.generation.schedule import Drawn, collect, draw
from prb_jax.cli import main
from prb_jax.errors import DataError
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.scoring.implicit import ImplicitRewards
from tests.json_lines import read_lines
from tests.scoring.records import write_model
from tests.tiny_policies import write_policy

OPTIONS = SampleOptions(n=2, temperature=1.0, max_new_tokens=7)


class Letters:
    """A reward model that counts a letter, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[prb.Comparison] = []

    def score(self, comparisons: Sequence[prb.Comparison]) -> list[np.ndarray]:
        self.asked += comparisons
        return [
            np.asarray([text.count("e") for text in asked.responses], np.float32) for asked in comparisons
        ]


def test_the_best_chunk_is_kept_each_time(policy, comparisons):
    comparisons = comparisons[:3]
    prompts = policy.encode(comparisons, profile_posts=0, limit=200)

    def drawn(
        weight: float, model: Any, options: SampleOptions = OPTIONS, chunk: int = 3, **more: Any
    ) -> dict[tuple[int, int], Drawn]:
        guide = Guide(model=model, weight=weight, candidates=3, chunk=chunk).checked(policy)
        batches = guide.draw(policy, comparisons, prompts, options, **more)
        return {(text.prompt, text.sample): text for batch in batches for text in batch}

    model = Letters()
    guided = drawn(1e6, model)
    assert guided.keys() == {(prompt, sample) for prompt in range(3) for sample in range(2)}
    best: dict[str, set[str]] = {}
    # of every three candidates the one with most letters goes on, equal ones by chance
    for asked in model.asked:
        top = max(text.count("e") for text in asked.responses)
        best.setdefault(asked.id, set()).update(text for text in asked.responses if text.count("e") == top)
    again = drawn(1e6, Letters(), rows=1)
    for key, text in guided.items():
        assert policy.decode(text.tokens) in best[comparisons[key[0]].id]
        assert len(text.tokens) == len(text.logprobs) == len(text.sampled_logprobs)
        assert (text.finish, len(text.tokens)) == ("length", 7) or text.tokens[-1] == 3
        assert ((text.tokens >= 0) & (text.tokens < policy.config.vocab_size)).all()
        np.testing.assert_array_equal(text.tokens, again[key].tokens)
        np.testing.assert_allclose(text.logprobs, again[key].logprobs, atol=1e-5)
    plain = {(text.prompt, text.sample): text for batch in policy.draw(prompts, OPTIONS) for text in batch}
    for key, text in drawn(0.0, None).items():
        np.testing.assert_array_equal(text.tokens, plain[key].tokens)
    # over the end of the first chunk, up to that of the second one, so that the same candidates go on
    begin, end = (policy.decode(guided[0, 0].tokens[:size]) for size in (2, 6))
    if (stop := end[len(begin) :]).strip():
        cut = drawn(1e6, Letters(), replace(OPTIONS, stop=(stop,)))
        assert (cut[0, 0].finish, stop in policy.decode(cut[0, 0].tokens)) == ("text", True)
    with pytest.raises(DataError, match="temperature: expected more than 0"):
        drawn(1.0, Letters(), SampleOptions(temperature=0.0))
    with pytest.raises(DataError, match="chunk: expected 1 or more"):
        drawn(1.0, Letters(), chunk=0)


def test_a_negative_weight_keeps_no_chunk_without_a_word(policy, comparisons):
    """Nothing is known of the reward of such a chunk, so that it is never the best one."""
    guide = Guide(model=Letters(), weight=-1e6, candidates=3, chunk=3)
    values = np.asarray([-np.inf, 2.0, 1.0])
    assert [guide.best(values, np.zeros(3)), replace(guide, weight=1e6).best(values, np.zeros(3))] == [2, 1]
    prompts = policy.encode(comparisons[:1], profile_posts=0, limit=200)
    for batch in guide.draw(policy, comparisons[:1], prompts, OPTIONS):
        assert all(policy.decode(text.tokens).strip() for text in batch)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_5"])
def test_caches_give_what_reading_again_gives(policy, comparisons, tmp_path, monkeypatch, family):
    """Tokens, log-probabilities and rewards, with reward models of windows and of states, with a profile in view."""
    model = prb.load(write_model(tmp_path / "rm", family, num_hidden_layers=2))
    prompts = policy.encode(comparisons[:2], profile_posts=1, limit=200)
    options = SampleOptions(n=1, temperature=1.0, max_new_tokens=12)
    cached: list[np.ndarray] = []
    score = chunk_caches.RewardCaches.score

    def noted(self: Any, *asked: Any, **places: Any) -> list[np.ndarray]:
        rewards = score(self, *asked, **places)
        cached.extend(rewards)
        return rewards

    monkeypatch.setattr(chunk_caches.RewardCaches, "score", noted)
    guide = Guide(model=model, weight=200.0, candidates=3, chunk=4)
    guided = [
        text for batch in guide.draw(policy, comparisons[:2], prompts, options, rows=3) for text in batch
    ]
    read_again: list[np.ndarray] = []
    for number, text in enumerate(guided):
        tokens = np.zeros(0, np.int32)
        logprobs: list[np.ndarray] = []
        for chunk in range(3):
            seed = int(np.random.SeedSequence([0, chunk]).generate_state(1)[0] >> 1)
            drawing = SampleOptions(n=3, temperature=1.0, max_new_tokens=4, seed=seed)
            longer = [replace(prompts[number], ids=np.concatenate([prompts[number].ids, tokens]))]
            programs = make_programs(policy.program, policy.shape(longer, drawing))
            task = policy.task(longer, drawing, numbers=[number])
            (candidates,) = collect(draw(programs, policy.params, task))
            texts = [policy.decode(np.concatenate([tokens, candidate.tokens])) for candidate in candidates]
            asked = list(dict.fromkeys(text for text in texts if text.strip()))
            read_again += model.score([replace(comparisons[number], responses=asked, labels=None)])
            rewards = dict.fromkeys(texts, -np.inf) | dict(zip(asked, read_again[-1], strict=True))
            noise = np.random.default_rng([0, number, 4 * (chunk + 1)]).gumbel(size=3)
            kept = candidates[int(np.argmax([200.0 * rewards[text] for text in texts] + noise))]
            tokens, logprobs = np.concatenate([tokens, kept.tokens]), [*logprobs, kept.logprobs]
            if kept.finish == "stop":
                break
        np.testing.assert_array_equal(text.tokens, tokens)
        np.testing.assert_allclose(text.logprobs, np.concatenate(logprobs), atol=1e-5)
    assert len(cached) == len(read_again) > 2
    for ours, expected in zip(cached, read_again, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_rewards_with_other_angles_for_longer_conversations_are_those_of_whole_texts(
    policy, comparisons, tmp_path, monkeypatch
):
    """A conversation that grows beyond the switch has other keys from its first token on, so a cache is of no use."""
    sizes = {"num_hidden_layers": 2, "original_max_position_embeddings": 76}
    model = prb.load(write_model(tmp_path / "rm", "phi3-longrope", **sizes))
    assert model.decoder.rope_switch == 76
    asked: list[tuple[prb.Comparison, np.ndarray]] = []
    rewards = Guide._rewards

    def noted(self: Guide, places: Any, shown: Any, judge: Any) -> list[np.ndarray]:
        given = rewards(self, places, shown, judge)
        asked.extend(
            (one, row[[of_text[0] for of_text in worded]])
            for (one, worded), row in zip(shown, given, strict=True)
        )
        return given

    monkeypatch.setattr(Guide, "_rewards", noted)
    prompts = policy.encode(comparisons[:2], profile_posts=1, limit=200)
    guide = Guide(model=model, weight=2.0, candidates=2, chunk=4)
    list(guide.draw(policy, comparisons[:2], prompts, SampleOptions(temperature=1.0, max_new_tokens=12)))
    asked = [(one, row) for one, row in asked if len(row)]
    lengths = [len(tree.sequence(0)) for tree in model.encode([one for one, _ in asked])]
    assert min(lengths) < 76 < max(lengths), lengths
    for (_, row), expected in zip(asked, model.score([one for one, _ in asked]), strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-5)


def test_a_run_says_what_guided_it_and_goes_on(folder, tmp_path):
    model = write_model(tmp_path / "rm", "qwen3", num_hidden_layers=1)
    data, samples = str(folder / "pairs.jsonl"), tmp_path / "run" / "samples.jsonl"
    given = {"weight": 2.0, "candidates": 2, "chunk": 3, "limit": 3, "options": OPTIONS, "progress": False}

    def run() -> dict[str, Any]:
        return prb.guide(folder / "policy", model, data, out=tmp_path / "run", **given).summary

    summary = run()
    assert (summary["chunk"], summary["candidates"], summary["samples"]) == (3, 2, 2)
    behaviour = json.loads((tmp_path / "run" / "behaviour.json").read_text())
    assert behaviour["figures"][0]["setting"]["chunk"] == 3
    before = samples.read_bytes()
    samples.write_bytes(before[: before.index(b"\n") + 20])
    (tmp_path / "run" / "summary.json").unlink()
    assert run()["n"] == 3
    assert samples.read_bytes() == before
    with pytest.raises(DataError, match="chunk: requires a reward model"):
        prb.guide(folder / "policy", None, data, out=tmp_path / "none", chunk=3)


def test_the_implicit_reward_of_a_policy_guides_chunks(folder, tmp_path, monkeypatch):
    """From the command line, with the rewards that `prb_jax.load` gives."""
    write_policy(tmp_path / "trained", "qwen3", eos=3, num_hidden_layers=2, seed=5)
    trained, base = str(tmp_path / "trained"), str(folder / "policy")
    asked: list[tuple[prb.Comparison, np.ndarray]] = []
    score = ImplicitRewards.score

    def noted(self: ImplicitRewards, comparisons: Sequence[prb.Comparison]) -> Any:
        rewards = score(self, comparisons)
        asked.extend(zip(comparisons, rewards, strict=True))
        return rewards

    monkeypatch.setattr(ImplicitRewards, "score", noted)
    words = [
        "guide", base, "--reward", trained, "--reference", base, "--beta", "0.5", "--data", str(folder / "pairs.jsonl"),
        "--limit", "2", "--weight", "1000", "--candidates", "3", "--chunk", "3", "--temperature", "1",
        "--max-new-tokens", "6", "--out", str(tmp_path / "out"), "--no-progress",
    ]  # fmt: skip
    assert main(words) == 0
    recorded = json.loads((tmp_path / "out" / "run.json").read_text())["inputs"]["guide"]["reward_model"]
    assert (recorded["readout"], recorded["beta"]) == ("implicit", 0.5)
    monkeypatch.undo()
    assert len(asked) >= 4
    expected = prb.load(trained, reference=base, beta=0.5).score([comparison for comparison, _ in asked])
    for (_, rewards), again in zip(asked, expected, strict=True):
        np.testing.assert_allclose(rewards, again, atol=1e-5)
    texts = [row["text"] for row in read_lines(tmp_path / "out" / "samples.jsonl")]
    best = {one.responses[int(np.argmax(rewards))] for one, rewards in asked}
    assert len(texts) == 2
    assert set(texts) <= best
    with pytest.raises(DataError, match="reference: requires a reward model"):
        prb.guide(
            base, None, folder / "pairs.jsonl", out=tmp_path / "none", loading=LoadOptions(reference=base)
        )
    guide = Guide(model=prb.load(trained, reference=base), weight=1.0, candidates=2)
    with pytest.raises(DataError, match="token by token: it rewards only whole responses"):
        guide.checked(prb.load_policy(base))
