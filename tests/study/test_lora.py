"""Adapters of the backbone for groups of people: a study of a model that can be trained, and its use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.errors import RunError
from prb_jax.personal.few_shot.registry import read_settings
from tests.study.people import choice
from tests.training.tiny import WORDS, write_causal_model, write_model

SETTINGS = ("lora.clusters=2", "lora.rounds=2", "lora.steps=40", "lora.own_steps=60", "lora.rate=0.005",
            "lora.rank=4")  # fmt: skip


def people(users: int, each: int) -> list[prb.Comparison]:
    """Half of the people prefer the response that begins with yes, the other half the one that begins with no."""
    rng, made = np.random.default_rng(0), []
    for user in range(users):
        first, second = ("yes", "no") if user < users // 2 else ("no", "yes")
        for number in range(each):
            question, *texts = (" ".join(rng.choice(WORDS, 3)) for _ in range(3))
            pair = f"{first} {texts[0]}", f"{second} {texts[1]}"
            made.append(choice(f"{user}-{number}", f"user {user}", *pair, question + "?"))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_model, write_causal_model], ids=["reward model", "language model"])
def test_groups_that_want_opposite_things_are_found_and_a_new_person_is_told_by_a_few_choices(
    tmp_path: Path, write: Any
) -> None:
    data = people(24, 12)
    write(tmp_path / "model")
    study = prb.personalise(
        data, backbone=tmp_path / "model", out=tmp_path / "study", methods=["lora"], shots=(0, 1, 4),
        settings=read_settings(SETTINGS), progress=False,
    )  # fmt: skip
    unseen = [row for row in study.results if row["split"] == "unseen"]
    accuracy = {(row["method"], row["shots"]): row["accuracy"] for row in unseen}
    assert accuracy["lora", 4] >= 0.99, accuracy  # of the Bayes accuracy, which is 1
    assert accuracy["lora", 0] < 0.7
    assert accuracy["lora, shuffled user", 4] < 0.9
    assert accuracy["pooled", 0] < 0.7
    assert (tmp_path / "study" / "curves.svg").is_file()
    model: Any = prb.load(tmp_path / "study" / "fitted" / "lora")
    splits = json.loads((tmp_path / "study" / "splits.json").read_text())["splits"][0]
    for user in splits["unseen"]:
        of_user = [one for one in data if one.user_id == user]
        model.adapt(user, of_user[:6])
        assert all(scores[0] > scores[1] for scores in model.score(of_user[6:]))


def test_what_cannot_be_trained_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "features.json").write_text("{}")
    for name, named in (("bert", "the encoder"), ("features", "the folder of features")):
        options: Any = {"out": tmp_path / "study", "methods": "lora,lora_users", "progress": False}
        expected = f"lora, lora_users: trains the backbone: expected a decoder .* found {named}"
        with pytest.raises(RunError, match=expected):
            prb.personalise(people(8, 2), backbone=tmp_path / name, **options)
    assert not (tmp_path / "study").exists()
