"""The command line with a model: a checkpoint on disk, scored by real processes that are killed."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from prb_jax import cli
from tests.plain_process import plain_environment
from tests.tiny_tokenizer import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
COUNT = 600
"""Comparisons: more than a window of the stream, so that a run has two."""
WORDS = ("tea", "walk", "rain", "music", "bread", "hill", "train", "letter", "garden", "soup", "chess")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Qwen3-shaped reward model with random weights, written by our own exporter."""
    import jax

    from prb_jax.checkpoints.load import abstract_params
    from prb_jax.checkpoints.save import save_params
    from prb_jax.models.config.decoder import parse_config

    raw = {
        "architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3", "vocab_size": 400,
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "id2label": {"0": "reward"}, "pad_token_id": 0,
        "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "float32",
    }  # fmt: skip
    config = parse_config(raw, where="test")
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape, scale=0.3).astype(np.float32), abstract_params(config)
    )
    folder = write_tokenizer(tmp_path_factory.mktemp("model") / "tiny")
    save_params(params, config, folder, raw_config=raw)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    rng = np.random.default_rng(1)

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS, words))

    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [
        {
            "id": f"p{i}", "user_id": f"u{i % 30}", "subset": f"s{i % 2}", "question": text(5) + "?",
            "chosen": text(int(rng.integers(3, 30))), "rejected": text(int(rng.integers(3, 30))) + ".",
            "profile": [{"id": j, "category": "c", "text": text(12)} for j in range(i % 3)],
        }
        for i in range(COUNT)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return plain_environment() | {
        "JAX_PLATFORMS": "cpu",
        "PRB_JAX_CACHE": str(tmp_path_factory.mktemp("cache")),
    }


def command(*arguments: object) -> list[str]:
    """As the console script does it: `main()` without arguments."""
    code = "import sys; from prb_jax.cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, *map(str, arguments)]


def prb(*arguments: object, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )


def programs(environment: dict[str, str]) -> set[Path]:
    """The compiled programs that are kept for the next process."""
    return set(Path(environment["PRB_JAX_CACHE"]).rglob("*-cache"))


def scores_of(out: Path) -> np.ndarray:
    return np.array([json.loads(line)["scores"] for line in (out / "scores.jsonl").read_text().splitlines()])


@pytest.fixture(scope="module")
def whole(model, data, environment, tmp_path_factory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = prb(
        "evaluate", model, "--data", data, "--out", out, "--batch-tokens", 1024, environment=environment
    )
    assert done.returncode == 0, done.stderr
    assert f"{COUNT} comparisons of 30 users" in done.stdout
    assert "tokens/s" in done.stderr
    return out


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moments", [(150,), pytest.param((0, 150, 550), marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_same_command_ends_with_the_same_bytes_and_compiles_nothing(
    model, data, environment, whole, tmp_path, moments
):
    out = tmp_path / "killed"
    arguments = command("evaluate", model, "--data", data, "--out", out, "--batch-tokens", 1024)
    kills, compiled = 0, programs(environment)
    assert compiled
    for rows in moments:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        scores = out / "scores.jsonl"
        while process.poll() is None:
            if scores.exists() and scores.read_bytes().count(b"\n") >= rows:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                break
            time.sleep(0.01)
    assert kills == len(moments)
    assert not (out / "summary.json").exists()
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert programs(environment) == compiled
    for name in ("scores.jsonl", "summary.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    ids = [json.loads(line)["id"] for line in (out / "scores.jsonl").read_text().splitlines()]
    assert ids == [f"p{i}" for i in range(COUNT)]


def test_scores_do_not_depend_on_the_batch(model, data, whole, tmp_path):
    out = tmp_path / "run"
    options = ["--batch-tokens", "8192", "--controls", "none", "--no-progress"]
    assert cli.main(["evaluate", str(model), "--data", str(data), "--out", str(out), *options]) == 0
    assert np.abs(scores_of(whole)).max() > 0.1
    assert np.abs(scores_of(out) - scores_of(whole)).max() < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_processes_give_the_same_scores_and_one_writes(model, data, environment, whole, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    out = tmp_path / "run"
    arguments = ("evaluate", model, "--data", data, "--out", out, "--batch-tokens", 2048, "--distributed")
    together = environment | {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    processes = [
        subprocess.Popen(
            command(*arguments), cwd=ROOT, env=together | {"JAX_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert f"{COUNT} comparisons" in outputs[0][0]
    assert "comparisons" not in outputs[1][0]
    assert np.abs(scores_of(out) - scores_of(whole)).max() < 1e-5
    (session,) = json.loads((out / "run.json").read_text())["sessions"]
    assert session["devices"]["processes"] == 2


def test_run_json_names_the_weights_and_refuses_others(model, data, whole, capsys):
    run = json.loads((whole / "run.json").read_text())
    assert set(run["inputs"]["model"]["files"]) >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert re.fullmatch("sha256:[0-9a-f]{64}", run["inputs"]["model"]["template"])
    (session,) = run["sessions"]
    assert session["devices"]["platform"] == "cpu"
    assert session["mesh"]
    assert session["batch_tokens"] == 1024
    changed = ["--dtype", "bfloat16", "--profile-posts", "2"]
    assert cli.main(["evaluate", str(model), "--data", str(data), "--out", str(whole), *changed]) == 2
    said = capsys.readouterr().err
    assert 'model.dtype: "float32" -> "bfloat16"' in said
    assert "profile_posts: 10 -> 2" in said


def test_inspect_says_what_the_checkpoint_is(model, capsys):
    assert cli.main(["inspect", str(model)]) == 0
    said = capsys.readouterr().out
    for fact in ("Qwen3ForSequenceClassification", "score.weight", "2,048 tokens", "sha256:"):
        assert fact in said


def test_a_model_that_cannot_be_used_is_one_line(data, tmp_path, capsys):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "t5", "architectures": ["X"]}')
    for verb, *options in (("evaluate", "--data", data, "--out", tmp_path / "run"), ("inspect",)):
        assert cli.main([verb, str(tmp_path / "broken"), *map(str, options)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("prb: error: ")
        assert "t5" in said
        assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()
