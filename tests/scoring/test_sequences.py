"""Reward models on encoders in the loop of scoring: equal sequences once, runs in parts, meshes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.text.view import View
from prb_jax.trees import sequences
from tests.scoring.records import TOLERANCE, read_json, score_rows, write_comparisons
from tests.scoring.test_pair_model import comparison
from tests.tiny_encoders import write_encoder

MIXED = [comparison(number, 2 + number % 3, longest=30) for number in range(48)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deberta")
    write_encoder(path, "DebertaV2ForSequenceClassification", num_labels=1)
    return path


@pytest.fixture(scope="module")
def rm(folder: Path) -> prb.RewardModel:
    return prb.load(folder, mesh="data=1")


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "GROUP", 2)


def counted(rm: prb.RewardModel) -> tuple[prb.RewardModel, list[int]]:
    """The model, and how many sequences each batch has."""
    computed: list[int] = []

    def score(params: Any, batch: Any) -> Any:
        computed.append(int((np.asarray(batch.lengths) > 0).sum()))
        return rm.score_fn(params, batch)

    return replace(rm, score_fn=score), computed


def test_equal_sequences_are_computed_once_and_few_shapes_compile(rm: prb.RewardModel) -> None:
    """As of data where many people choose between the same answers."""
    answers = [comparison(number).responses[0] for number in range(16)]
    pairs = [
        replace(comparison(0), id=f"{a}-{b}", responses=(answers[a], answers[b]))
        for a, b in itertools.combinations(range(16), 2)
    ]
    model, computed = counted(rm)
    before = rm.score_fn._cache_size()  # pyright: ignore[reportFunctionMemberAccess]
    scores = model.score(pairs, profile_posts=0, batch_tokens=128)
    assert sum(computed) == len(set(answers))
    assert len(computed) > 2
    assert rm.score_fn._cache_size() - before <= 2  # pyright: ignore[reportFunctionMemberAccess]
    alone = {answer: rm.reward(pairs[0].question, answer, profile_posts=0) for answer in answers}
    for pair, row in zip(pairs, scores, strict=True):
        np.testing.assert_allclose(row, [alone[text] for text in pair.responses], atol=TOLERANCE, rtol=0)


def test_what_is_done_is_not_computed_again(rm: prb.RewardModel) -> None:
    """The others have the same bytes, although some of their sequences are those of finished groups."""
    rows = [*MIXED, *(replace(one, id=f"again {one.id}") for one in MIXED[::4])]
    model, computed = counted(rm)
    options: Any = {"view": View(0), "batch_tokens": 128}
    whole = list(model.stream(rows, **options))
    assert len(whole) > 4
    assert sorted(index for batch in whole for index in batch.indices) == list(range(len(rows)))
    everything = sum(computed)
    assert everything == len({(one.question, text) for one in rows for text in one.responses})
    assert sum(batch.computed or 0 for batch in whole) < 1.5 * sum(sum(batch.tokens) for batch in whole)
    done = {index for batch in whole[::2] for index in batch.indices}
    computed.clear()
    rest = list(model.stream(rows, skip=done.issuperset, **options))
    for batch, other in zip(rest, whole[1::2], strict=True):
        assert (batch.indices, batch.computed) == (other.indices, other.computed)
        for row, same in zip(batch.scores, other.scores, strict=True):
            assert row.tobytes() == same.tobytes()
    assert sum(computed) < 0.85 * everything


def test_runs_in_parts_have_the_bytes_of_a_whole_run(folder: Path, tmp_path: Path) -> None:
    data = write_comparisons(tmp_path / "data.jsonl", MIXED)
    command = ["evaluate", str(folder), "--data", str(data), "--profile-posts", "1", "--max-length", "64"]
    command += ["--batch-tokens", "128", "--no-progress", "--controls", "none", "--out"]
    assert cli.main([*command, str(tmp_path / "whole")]) == 0
    parts = [str(tmp_path / f"part{number}") for number in (1, 2, 3)]
    for number, part in enumerate(parts, start=1):
        assert cli.main([*command, part, "--part", f"{number}/3"]) == 0
    assert all(0 < read_json(Path(part) / "part.json")["rows"] < 40 for part in parts)
    merged = str(tmp_path / "merged")
    assert cli.main(["merge", *parts, "--out", merged]) == 0
    assert cli.main([*command, merged]) == 0
    for name in ("scores.jsonl", "summary.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    tokens = read_json(tmp_path / "whole" / "summary.json")["tokens"]
    assert tokens["alone"] == sum(row["tokens"] for row in score_rows(tmp_path / "whole"))


def test_the_pure_function_under_transforms(rm: prb.RewardModel) -> None:
    batch = rm.batch(rm.encode(MIXED[:5], profile_posts=0))
    expected = rm.score(MIXED[:5], profile_posts=0)

    @jax.jit
    def margins(params: Any) -> jax.Array:
        rewards = rm.score_fn(params, batch)  # pyright: ignore[reportArgumentType]
        assert rewards.shape == (5, 4)
        return rewards[:, 0] - rewards[:, 1]

    wanted = [row[0] - row[1] for row in expected]
    np.testing.assert_allclose(margins(rm.params), wanted, atol=2 * TOLERANCE)
    gradients = jax.grad(lambda params: margins(params)[0])(rm.params)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(leaf).all(), path
    assert np.abs(gradients["head"]["classifier.weight"]).max() > 0
    twice = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), rm.params)
    np.testing.assert_allclose(jax.vmap(margins)(twice), [wanted, wanted], atol=2 * TOLERANCE)
    with pytest.raises(ValueError, match="at least one tree, found none"):
        rm.batch([])


@pytest.mark.slow
def test_the_same_scores_on_a_mesh(folder: Path, rm: prb.RewardModel, tmp_path: Path) -> None:
    data = write_comparisons(tmp_path / "data.jsonl", MIXED)
    code = (
        "import jax, json, sys, numpy as np\n"
        "jax.config.update('jax_num_cpu_devices', 8)\n"
        "import prb_jax as prb\n"
        "rm = prb.load(sys.argv[1], mesh='data=2,fsdp=2,tensor=2')\n"
        "rows = list(prb.read_comparisons(sys.argv[2]))\n"
        "scores = rm.score(rows, profile_posts=0, batch_tokens=256)\n"
        "batch = rm.batch(rm.encode(rows[:7], profile_posts=0))\n"
        "assert batch.tokens.shape[0] % 4 == batch.places.shape[0] % 4 == 0\n"
        "rewards = np.asarray(rm.score_fn(rm.params, batch))\n"
        "print(json.dumps([[s.tolist() for s in scores], rewards[:7].tolist()]))\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(data)]
    run = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    scores, rewards = json.loads(run.stdout.splitlines()[-1])
    expected = rm.score(MIXED, profile_posts=0)

    def assert_near(rows: Sequence[Any]) -> None:
        for row, wanted in zip(rows, expected, strict=False):
            np.testing.assert_allclose(row[: len(wanted)], wanted, atol=TOLERANCE, rtol=0)

    assert len(scores) == len(MIXED)
    assert_near(scores)
    assert_near(rewards)
