"""A tiny checkpoint, a few comparisons and short runs for the tests of training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.records.comparison import Comparison
from tests.json_lines import read_lines, write_lines
from tests.tiny_tokenizer import write_tokenizer

WORDS = ("tea", "walk", "rain", "music", "bread", "hill", "train", "letter", "garden", "soup", "chess")

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3", "vocab_size": 400,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "id2label": {"0": "LABEL_0"}, "pad_token_id": 0,
    "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "float32",
}  # fmt: skip


def write_model(folder: Path, **changes: Any) -> Path:
    """A reward model with random weights and a tokenizer."""
    import jax

    from prb_jax.models.checkpoints.load import abstract_params
    from prb_jax.models.checkpoints.save import save_params
    from prb_jax.models.config.decoder import parse_config

    raw = CONFIG | changes
    config = parse_config(raw, where="test")
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape, scale=0.2).astype(np.float32), abstract_params(config)
    )
    write_tokenizer(folder)
    return save_params(params, config, folder, raw_config=raw)


def write_causal_model(folder: Path) -> Path:
    """The same without a head, as a language model."""
    from safetensors.numpy import load_file, save_file

    write_model(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = {**CONFIG, "architectures": ["Qwen3ForCausalLM"]}
    del raw["id2label"]
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def rows(count: int = 40, *, users: int = 8, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs whose chosen answer begins with a word of its own, so that a model can learn it."""
    rng = np.random.default_rng(seed)

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS, words))

    return [
        {
            "id": f"p{i}", "user_id": f"u{i % users}", "question": text(4) + "?",
            "chosen": "yes " + text(int(rng.integers(2, 9))), "rejected": "no " + text(int(rng.integers(2, 9))),
            "profile": [{"id": j, "category": "c", "text": text(9)} for j in range(i % 3)],
        }
        for i in range(count)
    ]  # fmt: skip


def write_rows(path: Path, pairs: list[dict[str, Any]]) -> Path:
    write_lines(path, pairs)
    return path


def comparisons(count: int = 40, *, users: int = 8, seed: int = 0) -> list[Comparison]:
    return [Comparison.from_row(row, where="test") for row in rows(count, users=users, seed=seed)]


def config(model: str | Path, data: Path, **changes: Any) -> Any:
    """The config of a short run; `optimizer__b2` is the key `optimizer.b2`."""
    from prb_jax.training.config import default_config

    chosen: Any = default_config()
    given = {
        "model": str(model), "data": str(data), "steps": 8, "batch.comparisons": 8, "checkpoint.every": 2,
        "validation.every": 4, "optimizer.learning_rate": 1e-3, "log.plot": False,
    }  # fmt: skip
    chosen.update_from_flattened_dict(
        given | {name.replace("__", "."): value for name, value in changes.items()}
    )
    return chosen


def curve(out: Path, *names: str) -> list[tuple[float, ...]]:
    """The named numbers of every row that has them, by step."""
    rows = [row for row in read_lines(out / "metrics.jsonl") if all(name in row for name in names)]
    return [tuple(row[name] for name in ("step", *names)) for row in rows]


def record(out: Path) -> dict[str, Any]:
    return json.loads((out / "train.json").read_text())


def validated(run: Any) -> np.ndarray:
    """Scores [n, 2] by the model of a run of the pairs that it held out."""
    import prb_jax as prb
    from prb_jax.training.config import load_settings
    from prb_jax.training.data import read_training_data

    about = record(run.out)
    settings = load_settings({**about["inputs"]["settings"], **about["sessions"][0]["settings"]})
    held_out = read_training_data(settings).validation.comparisons
    return np.asarray(prb.load(run.out).score(held_out, profile_posts=0))


@contextmanager
def stopped_at(monkeypatch: Any, step: int) -> Iterator[None]:
    """Runs inside stop after this step, as if a SIGTERM had come."""

    class Stop:
        def reached(self, now: int) -> str | None:
            return "SIGTERM" if now >= step else None

    @contextmanager
    def watch() -> Iterator[Stop]:
        yield Stop()

    with monkeypatch.context() as patch:
        patch.setattr("prb_jax.training.loop.watch_signals", watch)
        yield
