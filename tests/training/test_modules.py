"""A `flax.nnx.Module` of the user's own, trained: as an optax loop by hand, continued, refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file
from transformers import AutoTokenizer

import prb_jax as prb
from prb_jax.training import trainer as trainer_module
from prb_jax.training.data import Order, user_weights
from tests.plain_process import plain_environment
from tests.sweeps import sweep
from tests.tiny_module import Tiny, tiny_module
from tests.tiny_tokenizer import write_tokenizer
from tests.training.tiny import comparisons, curve, record, rows, stopped_at

STEPS, RATE = 8, 1e-2
EPS = 1e-3  # the gradient of a bias behind which rewards differ by nothing is noise, which a small one would enlarge


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def settings(**changes: Any) -> dict[str, Any]:
    given = {
        "steps": STEPS, "batch.comparisons": 8, "checkpoint.every": 2, "validation.every": 4,
        "optimizer.learning_rate": RATE, "log.plot": False, "log.tensorboard": False, "mesh": "data=1",
    }  # fmt: skip
    return given | {name.replace("__", "."): value for name, value in changes.items()}


def trained(out: Path, tokenizer: Any, module: Any = None, *, data: Any = None, **changes: Any) -> Any:
    wrt = changes.pop("wrt", None)
    return prb.train(
        settings(**changes),
        model=tiny_module() if module is None else module,
        tokenizer=tokenizer,
        data=rows(40) if data is None else data,
        out=out,
        wrt=wrt,
        progress=False,
    )


def several() -> list[prb.Comparison]:
    """Comparisons of two to four responses, with margins; one user has most of them."""
    made = []
    for number, one in enumerate(comparisons(12)):
        words = [*one.responses, "maybe " + one.responses[1], "soup " + one.responses[0]][: 2 + number % 3]
        made.append(
            prb.Comparison(
                id=one.id,
                question=one.question,
                responses=words,
                labels=[float(len(words) - k) for k in range(len(words))],
                user_id="ana" if number % 4 else f"u{number}",
                margin=0.1 * (number % 5) if len(words) == 2 else None,
            )
        )
    return made


def loop_by_hand(module: Tiny, tokenizer: Path, data: list[prb.Comparison]) -> dict[str, Any]:
    """The parameters after the same steps of AdamW in plain optax, one comparison after another."""
    from prb_jax.models.readouts.load_options import LoadOptions
    from prb_jax.scoring.module_model import load_module

    trees = load_module(module, LoadOptions(tokenizer=tokenizer, mesh="data=1")).encode(data, profile_posts=0)
    weights = user_weights(data)
    own: Any = nnx.merge(*nnx.split(module))
    own.eval()
    graphdef, first, rest = nnx.split(own, nnx.Param, ...)
    params: Any = first
    warmup, after = round(0.05 * STEPS), STEPS - round(0.05 * STEPS)
    assert warmup == 0

    def rate(step: Any) -> Any:
        share = 0.5 * (1 - jnp.cos(jnp.pi * jnp.minimum(step / after, 1.0)))
        return RATE + (0.1 * RATE - RATE) * share

    decays = jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.95, eps=EPS, weight_decay=0.01, mask=decays),
    )

    @jax.jit
    def reward(params: Any, ids: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params, rest).score_tokens(ids[None], jnp.asarray([len(ids)]))[0]

    def loss(params: Any, members: list[int]) -> Any:
        total = 0.0
        for member in members:
            tree, one = trees[member], data[member]
            rewards = [reward(params, jnp.asarray(tree.sequence(k))) for k in range(len(tree.responses))]
            labels = one.labels or ()
            above = [(i, j) for i in range(len(labels)) for j in range(len(labels)) if labels[i] > labels[j]]
            losses = [jax.nn.softplus(-(rewards[i] - rewards[j] - (one.margin or 0.0))) for i, j in above]
            total = total + weights[member] * sum(losses) / len(above)
        return total / sum(weights[member] for member in members)

    state, order = optimizer.init(params), Order(len(data), 8, 0)
    for step in range(STEPS):
        gradient = jax.grad(loss)(params, order.step(step).tolist())
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return {"/".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(params)}


def parameters(module: Any) -> dict[str, np.ndarray]:
    state = nnx.state(module, nnx.Param)
    return {"/".join(map(str, p)): np.asarray(v.get_value()) for p, v in nnx.to_flat_state(state)}


def test_training_is_the_optax_loop_by_hand(tokenizer: Path, tmp_path: Path) -> None:
    """With margins, weights of users, more than two responses, and microbatches of several lengths."""
    module, data = tiny_module(), several()
    before = parameters(module)
    result = trained(
        tmp_path / "run", tokenizer, module, data=data, validation__fraction=0.0, loss__user_weights=True,
        optimizer__eps=EPS, batch__tokens=256,
    )  # fmt: skip
    expected = loop_by_hand(module, tokenizer, data)
    found = parameters(result.module)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, atol=1e-6, rtol=0, err_msg=name)
        assert np.abs(found[name] - before[name]).max() > 1e-3 or name.endswith("bias")
        np.testing.assert_array_equal(parameters(module)[name], before[name])  # the given module is as it was
    assert result.module is not module
    assert result.module.dropout.deterministic is False


@pytest.fixture(scope="module")
def whole(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(tmp_path_factory.mktemp("runs") / "whole", tokenizer)


def numbers(out: Path) -> Any:
    return curve(out, "loss", "accuracy", "grad_norm"), curve(out, "validation_loss")


@pytest.mark.parametrize("step", sweep([3, 5], few=(0,)))
def test_an_interrupted_run_ends_with_the_same_bytes(
    tokenizer: Path, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    out = tmp_path / "stopped"
    with stopped_at(monkeypatch, step):
        stopped = trained(out, tokenizer)
    assert (stopped.stopped_by, stopped.steps, stopped.module) == ("SIGTERM", step, None)
    done = trained(out, tokenizer)
    assert numbers(out) == numbers(whole.out)
    for name in ("parameters.safetensors", "prb_view.json"):
        assert (out / "model" / name).read_bytes() == (whole.out / "model" / name).read_bytes()
    for name, leaf in parameters(done.module).items():
        np.testing.assert_array_equal(leaf, parameters(whole.module)[name])


def test_what_a_run_says_and_gives(tokenizer: Path, whole: Any, tmp_path: Path) -> None:
    inputs = record(whole.out)["inputs"]
    assert inputs["model"]["architecture"] == "tests.tiny_module.Tiny"
    assert inputs["model"]["state"].startswith("sha256:")
    assert inputs["learning_rate"] == RATE
    count = sum(leaf.size for leaf in parameters(tiny_module()).values())
    assert whole.summary["parameters"] == whole.summary["trained_parameters"] == count
    assert whole.summary["last_tenth"]["loss"] < math.log(2)
    # A finished run gives its module again, without a step.
    again = trained(whole.out, tokenizer)
    assert again.summary == whole.summary
    for name, leaf in parameters(again.module).items():
        np.testing.assert_array_equal(leaf, parameters(whole.module)[name])
    # Its scores are those of the validation.
    held = whole.summary["validation"]
    from prb_jax.training.config import load_settings
    from prb_jax.training.data import read_training_data

    data = read_training_data(load_settings(settings(), given=("data", "model")), data=rows(40)).validation
    options: dict[str, Any] = {"profile_posts": 0, "mesh": "data=1", "progress": False}
    found = prb.evaluate(whole.module, data.comparisons, tokenizer=tokenizer, **options)
    assert found.summary["accuracy"] == pytest.approx(held["accuracy"])
    differences = [row.scores[0] - row.scores[1] for row in found.rows]
    assert np.mean(np.log1p(np.exp(-np.asarray(differences)))) == pytest.approx(held["loss"], rel=1e-5)
    path = whole.out / "model" / "parameters.safetensors"
    with pytest.raises(prb.CheckpointError, match=r"config\.json"):
        prb.load(whole.out)
    with pytest.raises(prb.RunError, match=r"trains a flax\.nnx\.Module"):
        prb.convert(whole.out, tmp_path / "converted")
    assert path.exists()


def test_another_module_or_tokenizer_is_another_run(tokenizer: Path, whole: Any, tmp_path: Path) -> None:
    with pytest.raises(prb.RunError, match="state"):
        trained(whole.out, tokenizer, tiny_module(1))
    with pytest.raises(prb.RunError, match="tokenizer"):
        trained(whole.out, write_tokenizer(tmp_path / "other", vocab_size=380))


def test_a_mesh_gives_the_same_parameters(tokenizer: Path, whole: Any, tmp_path: Path) -> None:
    """And a parameter that the user has split stays split, with its moments."""
    write_tokenizer(tmp_path / "tokenizer")
    command = [sys.executable, "-m", "tests.training.module_on_mesh", str(tmp_path)]
    environment = plain_environment(devices=4) | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(command, env=environment, check=True, timeout=500)
    found, expected = (
        load_file(out / "model" / "parameters.safetensors") for out in (tmp_path / "run", whole.out)
    )
    for name, leaf in expected.items():
        if not name.endswith("bias"):  # some have gradients of noise alone
            np.testing.assert_allclose(found[name], leaf, atol=1e-5, rtol=0, err_msg=name)
    losses = [
        curve(out, "loss", "validation_loss") or curve(out, "loss") for out in (tmp_path / "run", whole.out)
    ]
    np.testing.assert_allclose(*losses, atol=1e-5, rtol=0)


def test_few_programs_are_compiled(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = trainer_module.RewardTrainer.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(trainer_module.RewardTrainer, "__init__", init)
    trained(tmp_path / "run", tokenizer, steps=16, batch__tokens=512, batch__max_buckets=2)
    (trainer,) = made
    program = trainer.program
    assert program.gradients._cache_size() <= 2
    assert trainer.rewards._cache_size() <= 2
    assert program.update._cache_size() == 1


def test_profiles_lengths_and_users_work_as_of_any_model(tokenizer: Path, tmp_path: Path) -> None:
    own = AutoTokenizer.from_pretrained(tokenizer)
    result = trained(
        tmp_path / "run", own, method="profile_context", profile_posts=2, max_length=120, batch_by="user", steps=4
    )  # fmt: skip
    assert json.loads((result.out / "model" / "prb_view.json").read_text())["profile_posts"] == 2
    assert result.summary["truncated"] > 0
    longer = trained(
        tmp_path / "run", own, method="profile_context", profile_posts=2, max_length=120, batch_by="user", steps=6
    )  # fmt: skip
    assert longer.summary["lengths"] == [4, 6]


def test_types_of_parameters_are_kept(tokenizer: Path, tmp_path: Path) -> None:
    module: Any = tiny_module()
    module.hidden.kernel.set_value(module.hidden.kernel.get_value().astype(jnp.bfloat16))
    module.hidden.dtype = jnp.float32
    result = trained(tmp_path / "run", tokenizer, module, steps=2)
    kernel = result.module.hidden.kernel.get_value()
    assert kernel.dtype == jnp.bfloat16
    assert not np.array_equal(kernel, module.hidden.kernel.get_value())


def test_a_filter_says_what_is_trained(tokenizer: Path, tmp_path: Path) -> None:
    def of_the_head(path: Any, value: Any) -> bool:
        return isinstance(value, nnx.Param) and "head" in path

    module = tiny_module()
    run = trained(tmp_path / "run", tokenizer, module, wrt=of_the_head, steps=2)
    changed = {
        name
        for name, leaf in parameters(run.module).items()
        if not np.array_equal(leaf, parameters(module)[name])
    }
    assert "head/kernel" in changed <= {"head/bias", "head/kernel"}
    assert record(run.out)["inputs"]["model"]["trained"] == ["head/bias", "head/kernel"]
    assert run.summary["trained_parameters"] == 17 < run.summary["parameters"]
    with pytest.raises(prb.RunError, match="trained"):
        trained(tmp_path / "run", tokenizer, module, steps=2)


class Bare(nnx.Module):
    vocab_size = 400

    def score_tokens(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        return lengths.astype(jnp.float32)


def test_what_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    def refused(message: str, module: Any = None, given: Any = tokenizer, **changes: Any) -> None:
        with pytest.raises(prb.RunError, match=message):
            trained(tmp_path / "run", given, module, **changes)

    refused("'tuning': is not used where a module is trained: expected 'full', found 'lora'", tuning="lora")
    refused("'lora.rank': is not used", lora__rank=4)
    refused("'dtype': is not used", dtype="bfloat16")
    refused("'method': is not used", method="persona_embedding")
    refused("'model': is not used", model="scratch")
    refused(
        "'optimizer.learning_rate': expected a number.*no attribute hidden_size",
        optimizer__learning_rate=None,
    )
    with pytest.raises(prb.RunError, match="'tokenizer': names"):
        prb.train(
            settings(tokenizer=str(tokenizer)),
            model=tiny_module(),
            tokenizer=tokenizer,
            data=rows(9),
            out=tmp_path,
        )
    refused("needs one", given=None)
    refused("expected an nnx.Param", Bare())
    refused("expected a method score_tokens", nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(prb.RunError, match="tokenizer: is only for a module given as model"):
        prb.train({"model": "scratch"}, tokenizer=tokenizer, data=rows(4), out=tmp_path / "run")

    module = tiny_module()
    module.head.bias.set_value(jnp.full(1, jnp.nan))
    refused("step 1: the loss or its gradient is not finite.*'p", module)


def test_the_width_decides_the_rate_where_it_is_named(tokenizer: Path, tmp_path: Path) -> None:
    module: Any = tiny_module()
    module.hidden_size = 200
    run = trained(tmp_path / "run", tokenizer, module, optimizer__learning_rate=None, steps=1)
    assert record(run.out)["inputs"]["learning_rate"] == pytest.approx(0.1 / 200)
