"""`prb ppo` from end to end: what is left, continued, refused; and facts that hold for any policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import prb_jax as prb
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.rl.dpo import encode_pairs
from prb_jax.behaviour.rl.settings import load_ppo_settings
from prb_jax.cli import main
from prb_jax.scoring.reader import encode_comparisons
from prb_jax.text.view import View
from tests.behaviour.rl.tiny import (
    BANDIT,
    LETTER,
    by_taste,
    comparisons,
    has_letter,
    metrics,
    settings,
    without_rollouts,
    write_config,
    write_reward,
    write_rows,
)
from tests.json_lines import read_lines
from tests.plain_process import plain_environment

ROOT = Path(__file__).resolve().parents[3]
UNSET = {"rollout.max_new_tokens": 128, "scoring.empty": None}
PPO = {"batch.epochs": 2, "batch.minibatch": 4, "kl.target": 1.0, "kl.horizon": 100, "rollout.keep_every": 2}


def run(model: Path, out: Path, reward: Any = has_letter, **changes: Any) -> prb.PpoResult:
    keys = {name.replace("__", "."): value for name, value in changes.items()}
    return prb.ppo({**settings(model), **keys}, out=out, data=comparisons(), reward=reward, progress=False)


def weights(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor."""
    return {name: tensor.tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}


def test_a_run_has_its_numbers_and_rollouts_and_is_a_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_rows(tmp_path / "data.jsonl"), tmp_path / "whole"
    given = settings(model) | PPO | {"data": data, "reward": write_reward(tmp_path)}
    config = write_config(tmp_path, given)
    assert main(["ppo", str(config), "seed=7", "--out", str(out), "--no-progress"]) == 0
    assert "reward" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints", "metrics.jsonl", "model", "rollouts.jsonl", "summary.json", "train.json"
    ]  # fmt: skip
    rows = metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["kl"] == 0.0 < rows[1]["kl"]
    # the KL was below its target
    coefficients = [row["kl_coefficient"] for row in rows[:2]]
    assert coefficients == pytest.approx([0.05, 0.05 * (1 - 0.2 * 32 / 100)])
    assert max(row["sampler_difference"] for row in rows) < 1e-4
    kept = read_lines(out / "rollouts.jsonl")
    places = [(step, rollout) for step in (1, 2) for _ in "ab" for rollout in range(4)]
    assert [(row["step"], row["rollout"]) for row in kept] == places
    assert all(row["reward"] == float(LETTER in row["text"]) for row in kept)

    assert json.loads((out / "summary.json").read_text())["last_tenth"]["reward"] == rows[-1]["reward"]
    with pytest.raises(prb.RunError, match=r"settings.loss.clip: 0.2 -> 0.3"):
        prb.ppo(config, overrides=["seed=7", "loss.clip=0.3"], out=out, progress=False)

    # The policy is a model for transformers and for us, with the same log-probabilities.
    torch = pytest.importorskip("torch")
    import transformers

    policy = prb.load_policy(out)
    sample = policy.sample(["Tea?"], max_new_tokens=8, seed=1)[0][0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    ids = np.concatenate([sample.prompt_token_ids, sample.token_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(theirs(torch.tensor(ids[None].astype(np.int64))).logits[0], -1).numpy()
    start = len(sample.prompt_token_ids)
    expected = [logprobs[start - 1 + t, token] for t, token in enumerate(sample.token_ids)]
    np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)
    assert policy.stop_ids == prb.load_policy(model).stop_ids


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_rate_of_zero_changes_nothing(model: Path, tmp_path: Path, dtype: str) -> None:
    """Also where matrices are rounded in each pass, and the weights that are trained are not."""
    kinds = {"dtype": dtype, "export_dtype": "float32"}
    run(model, tmp_path / "still", **BANDIT, **kinds, steps=2, optimizer__learning_rate=0.0)
    assert [row["kl"] for row in metrics(tmp_path / "still")] == [0.0, 0.0]
    assert weights(tmp_path / "still" / "model") == weights(model)


def test_a_bandit_of_two_users_with_opposite_tastes_is_solved_only_with_the_user_in_view(
    model: Path, tmp_path: Path
) -> None:
    """The optimum is known: a reward of 1 with the profile in the prompt, and of a half without it."""
    rewards = {}
    for posts, steps in ((10, 26), (0, 12)):
        run(model, tmp_path / str(posts), by_taste, **BANDIT, steps=steps, profile_posts=posts)
        rewards[posts] = [row["reward"] for row in metrics(tmp_path / str(posts))]
    assert np.mean(rewards[10][-5:]) > 0.95
    # Whatever is written, one of the two likes it; 0.07 is four standard errors of 768 rollouts.
    assert np.mean(rewards[0]) == pytest.approx(0.5, abs=0.07)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo", "reinforce++"])
def test_each_algorithm_solves_a_bandit(model: Path, tmp_path: Path, algorithm: str) -> None:
    """The optimum is known: 1."""
    run(model, tmp_path / "run", **(BANDIT | {"algorithm": algorithm}), steps=40)
    rewards = [row["reward"] for row in metrics(tmp_path / "run")]
    assert rewards[0] < 0.6
    assert np.mean(rewards[-5:]) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [("sft", {"steps": 40}), ("dpo", {"steps": 160, "optimizer.learning_rate": 3e-3, "loss.dpo_beta": 0.02})],
)
def test_what_is_distilled_from_samples_solves_a_bandit(
    model: Path, tmp_path: Path, algorithm: str, changes: dict[str, Any]
) -> None:
    """The samples that a reward prefers teach the policy as the reward itself does; the optimum is 1."""
    data, reward = str(write_rows(tmp_path / "prompts.jsonl", 512)), write_reward(tmp_path)
    options = SampleOptions(n=16, max_new_tokens=1, seed=1)

    def share(policy: Path, out: Path) -> float:
        prb.sample_data(policy, data, out=out, options=options, progress=False)
        return float(np.mean([LETTER in row["text"] for row in read_lines(out / "samples.jsonl")]))

    assert share(model, tmp_path / "samples") < 0.6
    prb.best_of_n(tmp_path / "samples", [reward], out=tmp_path / "best", progress=False)
    pairs = str(prb.distil(tmp_path / "best", out=tmp_path / "pairs").path)
    given = without_rollouts(settings(model)) | {"algorithm": algorithm, "data": pairs, "batch.prompts": 16}
    prb.ppo({**given, "checkpoint.every": 200, **changes}, out=tmp_path / "run", progress=False)
    assert share(tmp_path / "run", tmp_path / "after") > 0.95


@pytest.mark.slow
def test_with_a_kl_the_optimum_is_the_reference_tilted_by_the_reward(model: Path, tmp_path: Path) -> None:
    """p(token) is in proportion to p(reference) exp(reward / coefficient): the odds of a reward of 1 grow by e^2."""
    changes = BANDIT | {"kl.coefficient": 0.5, "optimizer.learning_rate": 3e-3, "batch.epochs": 2}
    run(model, tmp_path / "run", **changes, steps=90, rollout__n=16)
    run(model, tmp_path / "still", **changes, steps=8, rollout__n=64, optimizer__learning_rate=0.0)
    start = np.mean([row["reward"] for row in metrics(tmp_path / "still")])
    odds = start / (1 - start) * np.exp(1 / 0.5)
    best = odds / (1 + odds)
    end = metrics(tmp_path / "run")[-30:]
    assert best - start > 0.2
    assert np.mean([row["reward"] for row in end]) == pytest.approx(best, abs=0.04)
    divergence = best * np.log(best / start) + (1 - best) * np.log((1 - best) / (1 - start))
    assert np.mean([row["kl"] for row in end]) == pytest.approx(divergence, abs=0.08)


def test_results_do_not_depend_on_microbatches(model: Path, tmp_path: Path) -> None:
    """At a usual rate: Adam takes a gradient that is rounding alone for a step of the whole rate."""
    for tokens in (None, 1):
        changes = {"optimizer__learning_rate": 1e-5, "batch__tokens": tokens}
        run(model, tmp_path / str(tokens), **BANDIT, **changes, steps=2)
    for whole, single in zip(metrics(tmp_path / "None"), metrics(tmp_path / "1"), strict=True):
        assert whole == pytest.approx(single, abs=1e-5)


@pytest.mark.slow
def test_results_do_not_depend_on_the_mesh(model: Path, tmp_path: Path) -> None:
    meshes = ("data=4", "fsdp=2,tensor=2")
    command = [sys.executable, "-m", "tests.behaviour.rl.mesh_runs", str(model), str(tmp_path), *meshes]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=plain_environment(), timeout=900
    )
    assert done.returncode == 0, done.stderr
    run(model, tmp_path / "one", steps=2)
    for mesh in meshes:
        for ours, theirs in zip(metrics(tmp_path / "one"), metrics(tmp_path / mesh), strict=True):
            for name, value in ours.items():
                if name != "sampler_difference":  # rounding alone
                    assert theirs[name] == pytest.approx(value, abs=1e-5, rel=1e-5), (mesh, name)


def test_pairs_teach_adapters_that_peft_loads(model: Path, tmp_path: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    import transformers

    given = without_rollouts(settings(model, algorithm="dpo", tuning="lora", steps=4)) | {"lora.rank": 4}
    prb.ppo(given, out=tmp_path / "run", data=comparisons(), progress=False)
    rows = metrics(tmp_path / "run")
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)  # it starts as its reference
    assert rows[-1]["accuracy"] == 1.0
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    ids = torch.arange(5, 40)[None]
    load = transformers.AutoModelForCausalLM.from_pretrained
    merged = load(tmp_path / "run" / "model", dtype=torch.float32)
    base = load(model, dtype=torch.float32)
    with torch.no_grad():
        before = base(ids).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")(ids).logits.numpy()
        np.testing.assert_allclose(adapted, merged(ids).logits.numpy(), atol=1e-4)
    assert np.abs(adapted - before).max() > 0.01


@pytest.mark.parametrize("limit", [None, 0])
def test_both_responses_of_a_pair_end_as_they_should_be_written(
    model: Path, tmp_path: Path, limit: int | None
) -> None:
    """Also where the stop token alone does not fit any more, and a post has to go."""
    template = tmp_path / "no_stop.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")
    policy = prb.load_policy(model, chat_template=str(template))
    pairs = comparisons(2)
    if limit is not None:
        whole = encode_comparisons(pairs, policy.tokenizer, view=View(10))
        limit = max(len(tree.sequence(k)) for tree in whole for k in (0, 1))
    trees = list(encode_pairs(pairs, policy, profile_posts=10, max_length=limit))
    for tree, pair in zip(trees, pairs, strict=True):
        for response, text in zip(tree.responses, pair.responses, strict=True):
            assert response[-1] == policy.stop_ids[0]
            assert policy.decode(response[:-1]).strip() == text
        assert limit is None or len(tree.prefix) + max(map(len, tree.responses)) <= limit
    assert any(tree.truncation.any for tree in trees) == (limit is not None)


def test_preferred_responses_are_learned_by_the_loss_of_transformers(model: Path, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    given = without_rollouts(settings(model)) | {"algorithm": "sft", "batch.prompts": 2, "steps": 6}
    data = comparisons(2)
    prb.ppo(given, out=tmp_path / "run", data=data, progress=False)
    rows = metrics(tmp_path / "run")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = prb.load_policy(model)
    total, count, read = 0.0, 0, 0
    for one in data:  # the prompt as it is sampled from, the response, and the token that ends it
        prompt = policy.encode([one], profile_posts=10, limit=200)[0].ids
        response = policy.tokenizer.tokenizer(one.responses[0], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*prompt.tolist(), *response, policy.stop_ids[0]]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        with torch.no_grad():
            total += float(theirs(ids, labels=labels).loss) * (len(response) + 1)
        count += len(response) + 1
        read += len(prompt)
    assert rows[0]["loss"] == pytest.approx(total / count, abs=1e-5)
    assert rows[0]["tokens"] == read + count
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert prb.load_policy(tmp_path / "run").stop_ids == policy.stop_ids


@pytest.mark.parametrize("config", sorted((ROOT / "configs" / "rl").glob("*.py")), ids=lambda path: path.stem)
def test_a_config_names_its_command_and_can_be_run(config: Path) -> None:
    reward = [] if config.stem in ("dpo", "sft") else ["reward=MODEL"]
    read = load_ppo_settings(config, ["model=PATH", "data=FILE", *reward])
    assert f"prb ppo configs/rl/{config.name} " in config.read_text(encoding="utf-8")
    if config.stem == "paper":
        # No KL, one rollout, ten times the rate for the value function, a tenth of the score.
        assert (read.kl.coefficient, read.rollout.n, read.scoring.scale) == (0.0, 1, 0.1)
        assert read.value.learning_rate == pytest.approx(10 * read.optimizer.learning_rate)
        assert (read.batch.updates, read.scoring.failed) == (8, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "grpo", "rollout.n": 1}, r"rollout.n: expected at least 2 with algorithm=grpo"),
        ({"kl.place": "loss", "kl.estimator": "k1"}, r"expected k2 or k3 with kl.place=loss, found k1"),
        ({"kl.coeficient": 1.0}, r"unknown config key .*did you mean 'kl.coefficient'"),
        ({"batch.minibatch": 3}, r"batch.minibatch: expected a divisor of batch.prompts=8"),
        ({"algorithm": "dpo", **UNSET}, r"'reward': dpo learns from labelled pairs"),
        ({"algorithm": "sft", **UNSET}, r"'reward': sft learns from preferred responses"),
        ({"rollout.max_new_tokens": 250}, r"its prompt has \d+ tokens without profile"),
        ({"optimizer.eps": 0.0}, r"optimizer.eps: expected more than 0"),
    ],
)
def test_what_cannot_be_is_one_clear_error(model: Path, tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(prb.PrbError, match=message):
        prb.ppo(settings(model) | changes, out=tmp_path / "run", data=comparisons(), reward=has_letter)
