"""Plans of policies in training: what is held, and what is shared."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from prb_jax import cli
from prb_jax.measure.plan.chips import PlanOptions
from prb_jax.measure.plan.policy import plan_policy
from prb_jax.measure.plan.tables import policy_table
from tests.measure.plan.tiny import GIB, MATRICES, TINY, needs_libtpu

LAYERS = 3 * MATRICES
WORDS = 512 * 256  # of the embedding, and of the head
RANK = 16
ADAPTERS = 3 * RANK * (4 * 256 + 256 + 128 + 128 + 256 + 3 * (256 + 512))
SHAPE: dict[str, Any] = {"prefix": 128, "responses": 4, "response_length": 64, "batch": 4}


@needs_libtpu
@pytest.mark.slow
class TestOnTpus:
    def test_adapters_share_the_frozen_weights(self, config_file, capsys):
        command = [
            "plan", str(config_file), "--topology", "v5e:2x2", "--ppo", "--reward", str(config_file), "--json",
            "--prefix", "128", "--responses", "4", "--response-length", "64", "--batch", "4",
        ]  # fmt: skip
        assert cli.main(command) == 0
        planned = json.loads(capsys.readouterr().out)
        assert planned["fits"] is True
        held = planned["held"]
        frozen, value = "policy, frozen weights", "value function (adapters)"
        assert planned["shared"] == dict.fromkeys(("reference", value), "the policy's frozen weights")
        assert held["reference"] == 0
        assert held[frozen] == pytest.approx(2 * (LAYERS + 2 * WORDS) / 4, rel=0.02)
        assert held["reward model"] == pytest.approx(2 * (LAYERS + WORDS) / 4, rel=0.02)
        adapters = held["policy, adapters"]
        assert 4 * ADAPTERS / 4 <= adapters < 4 * ADAPTERS
        assert held[value] == adapters + 4 * 256  # and the head
        # Adam's two moments and one sum of gradients
        optimiser = held["optimiser and sums of gradients"]
        assert optimiser == pytest.approx(3 * (adapters + held[value]), rel=0.01)
        # two times keys and values of 4 prompts and 16 rollouts, in bfloat16, over four chips
        caches = 2 * 2 * 3 * 2 * 64 * (4 * 128 + 16 * 64) / 4
        assert caches <= planned["caches"] < 1.3 * caches
        assert set(planned["programs"]) == {"place", "draw", "look", "update", "score"}
        # For the time of the drawing: two kv heads, so that two chips split the weights and two have copies.
        drawn = 2 * (LAYERS + 2 * WORDS) / 2 + planned["caches"]
        # narrow arrays are padded to tiles
        assert 1.0 <= planned["programs"]["draw"]["argument_bytes_per_chip"] / drawn < 1.25
        assert "all-gather" in planned["programs"]["place"]["collectives"]
        assert set(planned["peaks"]) == set(planned["programs"])
        assert min(planned["peaks"].values()) >= sum(held.values())
        assert planned["peak_bytes_per_chip"] == max(planned["peaks"].values())

    @pytest.mark.parametrize("trunk", ["own", "shared"])
    def test_all_weights_have_copies(self, config_file, trunk: Any):
        options = PlanOptions(topology="v5e:2x2", tuning="full", value_trunk=trunk, **SHAPE)
        planned = plan_policy(config_file, options)
        weights = 4 * (LAYERS + 2 * WORDS) / 4
        assert planned.held["policy, weights"] == pytest.approx(weights, rel=0.02)
        assert planned.held["reference"] == pytest.approx(2 * LAYERS / 4 + 4 * 2 * WORDS / 4, rel=0.02)
        if trunk == "own":
            assert planned.held["value function (a copy)"] == pytest.approx(weights - 4 * WORDS / 4, rel=0.02)
            assert planned.shared == {}
        else:
            assert planned.held["value function (a head)"] == 4 * 256
            assert planned.shared == {"value function (a head)": "the policy's trunk"}

    def test_gemma_has_one_matrix_for_words_in_and_out_where_its_file_says_nothing(self, config_file):
        gemma = {
            "architectures": ["GemmaForCausalLM"],
            "model_type": "gemma",
            "hidden_act": "gelu_pytorch_tanh",
        }
        config_file.write_text(json.dumps({**TINY, **gemma}))
        planned = plan_policy(config_file, PlanOptions(topology="v5e:2x2", **SHAPE))
        assert planned.held["policy, frozen weights"] == pytest.approx(2 * (LAYERS + WORDS) / 4, rel=0.02)

    def test_a_policy_that_does_not_fit(self, config_file):
        config_file.write_text(json.dumps({**TINY, "vocab_size": 100_000_000}))
        planned = plan_policy(config_file, PlanOptions(topology="v5e:2x2", **SHAPE))
        assert planned.fits is False
        assert planned.peak_bytes_per_chip > 23 * GIB
        shown = io.StringIO()
        Console(file=shown, width=200).print(policy_table(planned, title="plan"))
        assert "docs/engines.md" in shown.getvalue()
