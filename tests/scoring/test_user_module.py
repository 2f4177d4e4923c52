"""A `flax.nnx.Module` of the user's own, evaluated: its scores, its programs, its record, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from transformers import AutoTokenizer

import prb_jax as prb
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.scoring.module_model import ModuleModel
from prb_jax.scoring.open_scorer import open_scorer
from tests.plain_process import ROOT, plain_environment
from tests.scoring.records import TOLERANCE, read_json, record, score_rows
from tests.tiny_module import VOCABULARY, Tiny, by_hand, tiny_module
from tests.tiny_tokenizer import write_tokenizer
from tests.training.tiny import comparisons, write_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def opened(module: Any, tokenizer: Any, **options: Any) -> ModuleModel:
    scorer = open_scorer(module, LoadOptions(**{"tokenizer": tokenizer, "mesh": "data=1", **options}))
    assert isinstance(scorer, ModuleModel)
    return scorer


def evaluated(module: Any, tokenizer: Any, **options: Any) -> prb.Evaluation:
    wanted = {"mesh": "data=1", "progress": False, **options}
    return prb.evaluate(module, comparisons(40), tokenizer=tokenizer, **wanted)


def test_scores_are_those_of_a_call_of_the_module(tokenizer: Path) -> None:
    module = tiny_module()
    rows = [record(number, 1 + number % 4) for number in range(10)]
    model = opened(module, tokenizer)
    for tree, scores in zip(model.encode(rows), model.score(rows), strict=True):
        sequences = [tree.sequence(k) for k in range(len(tree.responses))]
        np.testing.assert_allclose(scores, by_hand(module, sequences), atol=TOLERANCE, rtol=0)
    # The pure function on a batch of one's own.
    whole = np.asarray(model.score_fn(model.params, model.batch(model.encode(rows[:4]))))
    np.testing.assert_allclose(whole[3], model.score(rows[3]), atol=TOLERANCE, rtol=0)
    assert module.dropout.deterministic is False  # the user's module is as it was


def test_it_reads_what_a_reward_model_reads(tokenizer: Path, tmp_path: Path) -> None:
    """Ids, what was cut, and counts of tokens, whatever the view."""
    other = prb.load(write_model(tmp_path / "model"), mesh="data=1")
    module = tiny_module()
    module.max_position_embeddings = 512
    ours = opened(module, other.tokenizer.tokenizer)
    rows = [record(number, 2) for number in range(12)]
    views: Any = ({}, {"profile_posts": 0}, {"max_length": 170}, {"protocol": "paper", "max_length": 60})
    for view in views:
        for tree, expected in zip(ours.encode(rows, **view), other.encode(rows, **view), strict=True):
            assert [tree.sequence(k).tolist() for k in range(2)] == [
                expected.sequence(k).tolist() for k in range(2)
            ]
            assert tree.truncation == expected.truncation
    assert any(tree.truncation.any for tree in ours.encode(rows, max_length=170))


def test_the_module_of_the_docs_scores(tokenizer: Path) -> None:
    page = (ROOT / "docs" / "import.md").read_text(encoding="utf-8")
    code = page[page.index("    import jax.numpy as jnp") : page.index("    module = Mine(")]
    names: dict[str, Any] = {"__name__": "docs"}
    exec(textwrap.dedent(code), names)
    module = names["Mine"](VOCABULARY, 16, rngs=nnx.Rngs(0))
    row, model = record(1, 3), opened(module, tokenizer)
    (tree,) = model.encode([row])
    expected = by_hand(module, [tree.sequence(k) for k in range(3)])
    np.testing.assert_allclose(model.score(row), expected, atol=TOLERANCE, rtol=0)


def test_few_programs_are_compiled_and_none_twice(tokenizer: Path) -> None:
    rows = [record(number, 2 + number % 3, longest=200) for number in range(200)]
    model = opened(tiny_module(), tokenizer)
    trees = model.encode(rows)
    lengths = {len(tree.sequence(k)) for tree in trees for k in range(len(tree.responses))}
    before = model.score(rows)
    fn: Any = model.score_fn
    assert len(lengths) > 100
    assert fn._cache_size() <= 2
    for row, again in zip(before, model.score(rows), strict=True):
        np.testing.assert_array_equal(row, again)
    assert fn._cache_size() <= 2


@pytest.mark.slow
def test_a_mesh_gives_the_same_scores(tmp_path: Path) -> None:
    """And a parameter that the user has split stays split."""
    command = [sys.executable, "-m", "tests.scoring.module_on_mesh", str(tmp_path / "out.json")]
    environment = plain_environment(devices=4) | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(command, env=environment, check=True, timeout=300)
    found = read_json(tmp_path / "out.json")
    assert found["embedding"] == str(jax.sharding.PartitionSpec("fsdp"))
    assert found["kernel"] == str(jax.sharding.PartitionSpec())
    expected, scores = map(np.asarray, found["scores"])
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE, rtol=0)


def test_an_evaluation_is_recorded_and_continued(tokenizer: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = evaluated(tiny_module(), tokenizer, out=out, controls="all")
    assert first.summary["readout"] == "score_tokens"
    assert len(first.summary["ci95"]) == 2
    assert set(first.summary["controls"]) == {"blind", "swap"}
    run = read_json(out / "run.json")
    known = run["inputs"]["model"]
    assert known["architecture"] == "tests.tiny_module.Tiny" == first.summary["model"]
    assert known["state"].startswith("sha256:")
    assert known["tokenizer"]["files"]["tokenizer.json"].startswith("sha256:")
    assert run["inputs"]["versions"]["flax"]

    again = evaluated(tiny_module(), tokenizer, out=out, controls="all")
    assert again.summary == first.summary
    assert [row["scores"] for row in score_rows(out)] == [row.scores for row in first.rows]


@pytest.mark.parametrize("change", ["weight", "attribute", "tokenizer"])
def test_another_module_is_another_run(tokenizer: Path, tmp_path: Path, change: str) -> None:
    evaluated(tiny_module(), tokenizer, out=tmp_path / "run")
    evaluated(tiny_module(), str(tokenizer), out=tmp_path / "run")
    module, other = tiny_module(), tokenizer
    module.train()  # a mode is no change
    evaluated(module, tokenizer, out=tmp_path / "run")
    if change == "weight":
        module.head.bias.set_value(module.head.bias.get_value() + 1e-3)
    elif change == "attribute":
        module.norm.epsilon = 1e-3
    else:
        other = write_tokenizer(tmp_path / "other", vocab_size=380)
    field = "tokenizer" if change == "tokenizer" else "state"
    with pytest.raises(prb.RunError, match=field):
        evaluated(module, other, out=tmp_path / "run")


def test_a_tokenizer_may_be_an_object(tokenizer: Path, tmp_path: Path) -> None:
    own = AutoTokenizer.from_pretrained(tokenizer)
    own.backend_tokenizer.enable_truncation(5)
    first = evaluated(tiny_module(), own, out=tmp_path / "run")
    assert own.backend_tokenizer.truncation is not None  # it was copied
    assert first.rows == evaluated(tiny_module(), tokenizer).rows
    known = read_json(tmp_path / "run" / "run.json")["inputs"]["model"]["tokenizer"]["files"]
    assert known["tokenizer.json"].startswith("sha256:")
    assert evaluated(tiny_module(), own, out=tmp_path / "run").rows == first.rows
    plain = evaluated(tiny_module(), own, chat_template="plain")
    assert plain.rows != first.rows


class Wrong(Tiny):
    """What `score_tokens` returns is changed by a function."""

    change: Any = None

    def score_tokens(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        return self.change(super().score_tokens(tokens, lengths))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x[:, None],
            r"tokens int32 \[(\d+), \d+\].*expected float32 \[\1\], found float32 \[\1, 1\]",
        ),
        (lambda x: x.astype(jnp.bfloat16), r"expected float32 \[(\d+)\], found bfloat16 \[\1\]"),
        (lambda x: (x, x), r"Wrong\.score_tokens.*expected float32 \[\d+\], found tuple"),
        (lambda x: x * jnp.nan, r"comparison 'p\d+': .*\[nan, nan\]; expected finite numbers: all variables"),
        (lambda x: x * 0, r"gives every response the same score, -?0\.0"),
    ],
)
def test_what_it_may_not_return(tokenizer: Path, change: Any, message: str) -> None:
    module = Wrong(rngs=nnx.Rngs(0))
    module.change = change
    with pytest.raises(prb.RunError, match=message):
        evaluated(module, tokenizer)


def test_a_weight_that_is_not_finite_is_named(tokenizer: Path) -> None:
    module = tiny_module()
    module.hidden.kernel.set_value(module.hidden.kernel.get_value().at[0, 0].set(jnp.inf))
    with pytest.raises(prb.RunError, match="the variable hidden/kernel of the module has values"):
        evaluated(module, tokenizer)


class Drawing(Tiny):
    """Dropout that does not heed the evaluation mode."""

    def score_tokens(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        noise = jax.random.normal(self.dropout.rngs(), lengths.shape)  # pyright: ignore[reportOptionalCall]
        return super().score_tokens(tokens, lengths) + noise


class Silent(nnx.Module):
    def __call__(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        return jnp.zeros(lengths.shape)


def test_what_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    def refused(error: type[prb.PrbError], message: str, module: Any, given: Any = tokenizer, **more: Any):
        with pytest.raises(error, match=message):
            evaluated(module, given, **more)

    module = tiny_module()
    refused(prb.RunError, "tokenizer: the module tests.tiny_module.Tiny needs one.*found none", module, None)
    refused(prb.RunError, "tokenizer: expected a folder.*found builtins.int", module, 7)
    refused(prb.CheckpointError, "no such folder", module, str(tmp_path / "none"))
    refused(prb.RunError, r"Silent: expected a method score_tokens\(tokens int32 \[B, T\]", Silent())
    refused(prb.RunError, "expected an instance.*found the class tests.tiny_module.Tiny", Tiny)
    refused(
        prb.RunError, "dtype, attention: decided by the module", module, dtype="bfloat16", attention="xla"
    )
    refused(prb.RunError, "a change of dropout/rngs/count", Drawing(rngs=nnx.Rngs(0)))
    model = write_model(tmp_path / "model")
    refused(
        prb.RunError,
        "tokenizer: decided where the model was loaded",
        prb.load(model, mesh="data=1"),
        mesh=None,
    )
    refused(prb.RunError, "tokenizer: baseline:length reads", "baseline:length", mesh=None)
    own = AutoTokenizer.from_pretrained(tokenizer)
    refused(prb.RunError, "beside the name of a model, found TokenizersBackend", str(model), own)


def test_limits_that_a_module_names(tokenizer: Path) -> None:
    module = tiny_module(vocabulary=300)
    module.vocab_size = 300
    with pytest.raises(prb.DataError, match=r"token id \d+, but .*Tiny has only 300 embeddings"):
        evaluated(module, tokenizer)
    with pytest.warns(prb.PrbWarning, match=r"ids up to \d+, and no parameter has more than 300 rows"):
        opened(tiny_module(vocabulary=300), tokenizer)
    module = tiny_module()
    module.max_position_embeddings = 64
    with pytest.raises(prb.DataError, match=r"max_length 65 is more than the 64 tokens"):
        evaluated(module, tokenizer, max_length=65)
    assert evaluated(module, tokenizer).summary["truncated"] > 0
    module.max_position_embeddings = 0
    with pytest.raises(prb.RunError, match="max_position_embeddings: expected a positive number, found 0"):
        evaluated(module, tokenizer)
