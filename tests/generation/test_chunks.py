"""`prb guide --chunk`: weight 0 is the policy, the best candidate is kept, and a text depends on nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.errors import DataError
from prb_jax.generation.chunks import ChunkGuide
from prb_jax.generation.schedule import Drawn
from prb_jax.generation.settings import SampleOptions
from prb_jax.scoring.reward_model import RewardModel
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
    (top / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return top


def test_the_best_chunk_is_kept_each_time(folder: Path) -> None:
    policy = prb.load_policy(folder / "policy")
    comparisons = list(prb.read_comparisons(str(folder / "pairs.jsonl")))
    prompts = policy.encode(comparisons, profile_posts=0, limit=200)

    def drawn(weight: float, model: Any, options: SampleOptions = OPTIONS, **more: Any) -> dict[Any, Drawn]:
        guide = ChunkGuide(model=cast(RewardModel, model), weight=weight, candidates=3, chunk=3).checked(
            policy
        )
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
        ChunkGuide(model=cast(RewardModel, model), weight=1.0, candidates=3, chunk=0).checked(policy)


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
