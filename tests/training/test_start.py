"""Training starts from every reward model with a linear head, whatever its files call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import prb_jax as prb
from tests import tiny_tokenizer as tiny
from tests.models.readouts.checkpoints import write_row
from tests.scoring.records import record
from tests.training.tiny import config

BORROWED = "{% for message in messages %}[INST] {{ message['content'] }}{% endfor %}"


def train(folder: Path, data: Path, out: Path, **changes: Any) -> prb.RewardModel:
    given = {"tuning": "head", "steps": 1, "batch__comparisons": 4, **changes}
    return prb.load(prb.train(config(folder, data, **given), out=out, progress=False).out)


@pytest.mark.parametrize(
    ("row", "template", "fields"),
    [
        ("internlm2", tiny.CHAT, {"reward_token_id": 3}),
        ("starling", BORROWED, {}),
        ("ultra-rm", None, {}),
        ("nemotron-vocabulary", tiny.CHAT, {}),
    ],
)
def test_from_other_layouts(row: str, template: str | None, fields: dict, data: Path, tmp_path: Path) -> None:
    folder, _ = write_row(row, tmp_path, template=template, config=fields)
    after = train(folder, data, tmp_path / "run")
    before = prb.load(folder)
    assert after.config.architectures == ("LlamaForSequenceClassification",)
    # The user-blind run shows no posts by itself.
    (first,), (second,) = before.encode([record(1, 3)], profile_posts=0), after.encode([record(1, 3)])
    assert [first.sequence(k).tolist() for k in range(3)] == [second.sequence(k).tolist() for k in range(3)]
    for part in ("embed", "layers", "final_norm"):
        jax.tree.map(np.testing.assert_array_equal, before.params[part], after.params[part])
    moved = np.abs(np.asarray(before.params["score"]) - np.asarray(after.params["score"]))
    assert 0 < moved.max() < 0.05 < np.abs(before.params["score"]).max()


def test_heads_of_another_kind_are_refused_or_replaced(data: Path, tmp_path: Path) -> None:
    deep, _ = write_row("inf-orm", tmp_path / "deep")
    with pytest.raises(prb.CheckpointError, match=r"'inf-orm' is not a linear head.*init_head=true"):
        train(deep, data, tmp_path / "no")
    new = train(deep, data, tmp_path / "yes", init_head=True)
    assert new.params["score"].shape == (32, 1)
    np.testing.assert_array_equal(new.params["embed"], prb.load(deep).params["embed"])
    biased, _ = write_row("value-head", tmp_path / "biased")
    with pytest.raises(prb.CheckpointError, match=r"a bias of \[.*\], which no .*prb convert --drop-bias"):
        train(biased, data, tmp_path / "bias")
