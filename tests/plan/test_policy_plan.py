"""Plans of policies in training: what is held, what is shared, and what does not go together."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from prb_jax import cli
from prb_jax.plan.chips import PlanOptions
from prb_jax.plan.policy import plan_policy
from prb_jax.plan.tables import policy_table
from tests.plan.test_plan import GIB, TINY

LAYERS = 3 * 256 * (2 * 256 + 2 * 128 + 3 * 512)
WORDS = 512 * 256  # of the embedding, and of the head
NORMS = 3 * (2 * 256 + 2 * 64) + 256  # never split
RANK = 16
ADAPTERS = 3 * RANK * (4 * 256 + 256 + 128 + 128 + 256 + 3 * (256 + 512))
SHAPE: dict[str, Any] = {"prefix": 128, "responses": 4, "response_length": 64, "batch": 4}


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reward", "qwen3-40m"], "--reward is for policies: it needs --ppo"),
        (["--value-trunk", "own"], "--value-trunk is for policies: it needs --ppo"),
        (["--ppo", "--train"], "--train does not go with --ppo"),
        (["--ppo", "--sweep"], "--sweep does not go with --ppo"),
        (["--ppo", "--attention", "streams"], "--attention does not go with --ppo"),
        (["--ppo", "--questions-per-user", "2"], "--questions-per-user does not go with --ppo"),
        (["--ppo", "--quantize", "int8"], "--quantize does not go with --ppo"),
        (["--ppo", "--tuning", "head"], "--tuning: expected lora or full with --ppo, found head"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], message: str, capsys):
    assert cli.main(["plan", "qwen3-40m", "--topology", "v5e:2x2", *flags]) == 2
    assert message in capsys.readouterr().err


class TestOnTpus:
    """Compiled by libtpu."""

    @pytest.fixture(autouse=True)
    def _libtpu(self):
        pytest.importorskip("libtpu")

    @pytest.mark.slow
    def test_adapters_share_the_frozen_weights(self, config_file, capsys):
        command = [
            "plan", str(config_file), "--topology", "v5e:2x2", "--ppo", "--reward", str(config_file), "--json",
            "--prefix", "128", "--responses", "4", "--response-length", "64", "--batch", "4",
        ]  # fmt: skip
        assert cli.main(command) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["fits"] is True
        held = found["held"]
        frozen, value = "policy, frozen weights", "value function (adapters)"
        assert found["shared"] == dict.fromkeys(("reference", value), "the policy's frozen weights")
        assert held["reference"] == 0
        assert held[frozen] == pytest.approx(2 * (LAYERS + 2 * WORDS) / 4, rel=0.02)
        assert held["reward model"] == pytest.approx(2 * (LAYERS + WORDS) / 4, rel=0.02)
        adapters = held["policy, adapters"]
        assert 4 * ADAPTERS / 4 <= adapters < 4 * ADAPTERS
        assert held[value] == adapters + 4 * 256  # and the head
        # Adam's two moments and one sum of gradients
        assert held["optimiser and sums of gradients"] == pytest.approx(
            3 * (adapters + held[value]), rel=0.01
        )
        # two times keys and values of 4 prompts and 16 rollouts, in bfloat16, over four chips
        caches = 2 * 2 * 3 * 2 * 64 * (4 * 128 + 16 * 64) / 4
        assert caches <= found["caches"] < 1.3 * caches
        assert set(found["programs"]) == {"place", "draw", "look", "update", "score"}
        # For the time of the drawing: two kv heads, so that two chips split the weights and two have copies.
        drawn = 2 * (LAYERS + 2 * WORDS) / 2 + found["caches"]
        # narrow arrays are padded to tiles
        assert 1.0 <= found["programs"]["draw"]["argument_bytes_per_chip"] / drawn < 1.25
        assert "all-gather" in found["programs"]["place"]["collectives"]
        whole = sum(held.values())
        assert set(found["peaks"]) == set(found["programs"])
        assert min(found["peaks"].values()) >= whole
        assert found["peak_bytes_per_chip"] == max(found["peaks"].values())

    @pytest.mark.slow
    @pytest.mark.parametrize("trunk", ["own", "shared"])
    def test_all_weights_have_copies(self, config_file, trunk: Any):
        options = PlanOptions(topology="v5e:2x2", tuning="full", value_trunk=trunk, **SHAPE)
        found = plan_policy(config_file, options)
        weights = 4 * (LAYERS + 2 * WORDS) / 4
        assert found.held["policy, weights"] == pytest.approx(weights, rel=0.02)
        assert found.held["reference"] == pytest.approx(2 * LAYERS / 4 + 4 * 2 * WORDS / 4, rel=0.02)
        if trunk == "own":
            assert found.held["value function (a copy)"] == pytest.approx(weights - 4 * WORDS / 4, rel=0.02)
            assert found.shared == {}
        else:
            assert found.held["value function (a head)"] == 4 * 256
            assert found.shared == {"value function (a head)": "the policy's trunk"}

    @pytest.mark.slow
    def test_a_policy_that_does_not_fit(self, config_file):
        config_file.write_text(json.dumps({**TINY, "vocab_size": 100_000_000}))
        found = plan_policy(config_file, PlanOptions(topology="v5e:2x2", **SHAPE))
        assert found.fits is False
        assert found.peak_bytes_per_chip > 23 * GIB
        shown = io.StringIO()
        Console(file=shown, width=200).print(policy_table(found, title="plan"))
        assert "docs/engines.md" in shown.getvalue()
