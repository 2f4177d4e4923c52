"""A policy, a reward model with sliding windows and capped scores, and eight comparisons of four users."""

from pathlib import Path

import pytest

import prb_jax as prb
from tests.json_lines import write_lines
from tests.scoring.records import write_model
from tests.tiny_policies import write_policy


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Holds "policy", "rm" and "pairs.jsonl"."""
    top = tmp_path_factory.mktemp("generation")
    write_policy(top / "policy", "qwen3", eos=3, num_hidden_layers=2)
    write_model(top / "rm", "gemma2", num_hidden_layers=2)
    rows = [
        {"id": f"q{k}", "user_id": f"u{k % 4}", "question": f"What should I cook {k}?",
         "chosen": "Something quick." if k % 3 else "Rice, an oven, quick jam, zesty figs.",
         "rejected": "No, never." * (1 + k % 2),
         "profile": [{"id": "p", "category": "", "text": f"I like rice {k % 4}."}]}
        for k in range(8)
    ]  # fmt: skip
    write_lines(top / "pairs.jsonl", rows)
    return top


@pytest.fixture(scope="session")
def policy(folder) -> prb.Policy:
    return prb.load_policy(folder / "policy")


@pytest.fixture(scope="session")
def model(folder) -> prb.RewardModel:
    return prb.load(folder / "rm")


@pytest.fixture(scope="session")
def comparisons(folder) -> list[prb.Comparison]:
    return list(prb.read_comparisons(folder / "pairs.jsonl"))
