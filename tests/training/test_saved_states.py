"""Checkpoints: kept, restored onto other shardings, and told apart from damaged ones."""

import errno
import gc
import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.errors import RunError
from prb_jax.models.checkpoints.array_folder import checksums, flat_arrays, from_flat
from prb_jax.training.saved_states import Checkpoints


def arrays(step: int) -> dict[str, jax.Array]:
    noise = np.random.default_rng(step).normal(size=(64, 64)).astype(np.float32)
    return {
        "trainable/score": jnp.asarray(noise),
        "opt/count": jnp.int32(step),
        "half": jnp.asarray(noise[:3]).astype(jnp.bfloat16),
    }


def abstract(state: dict[str, jax.Array] | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    state = arrays(0) if state is None else state
    return {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for n, a in state.items()}


@pytest.fixture
def orbax_leftovers():
    """A read that fails leaves coroutines that complain when they are collected: that happens here."""
    yield
    gc.collect()


def save(folder: Path, steps: dict[int, float | None], **options) -> None:
    checkpoints = Checkpoints(folder, **options)
    for step, value in steps.items():
        checkpoints.save(step, arrays(step), {} if value is None else {"value": value})
    checkpoints.close()


def test_the_newest_and_the_best_are_kept_also_by_a_later_process(tmp_path):
    save(tmp_path, {1: 5.0, 2: 1.0, 3: None, 4: 3.0, 5: None})
    assert Checkpoints(tmp_path).steps() == [2, 4, 5]
    assert Checkpoints(tmp_path).best() == 2
    save(tmp_path, {6: 2.0, 7: 0.5, 8: None, 9: None})
    assert Checkpoints(tmp_path, read_only=True).steps() == [7, 8, 9]


def test_a_state_comes_back_bit_for_bit_with_its_facts(tmp_path):
    save(tmp_path, {3: None, 4: 0.25})
    saved = Checkpoints(tmp_path).restore_newest(abstract())
    assert saved is not None
    assert (saved.step, saved.facts["value"]) == (4, 0.25)
    for name, array in arrays(4).items():
        assert saved.arrays[name].dtype == array.dtype
        assert np.asarray(saved.arrays[name]).tobytes() == np.asarray(array).tobytes()


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    bump = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = {"a": jnp.zeros((512, 512)), "b": jnp.zeros(3)}
    for step in (1, 2, 3):
        state = bump(state)
        checkpoints.save(step, state, {})
        for _ in range(3):
            state = bump(state)
        state = jax.tree.map(lambda x: x - 3, state)
    checkpoints.close()
    for step in (2, 3):
        restored = Checkpoints(tmp_path).restore(step, abstract(state))
        assert float(restored.arrays["a"].min()) == float(restored.arrays["a"].max()) == step


def biggest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.usefixtures("orbax_leftovers")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: flip(biggest(folder)),
        lambda folder: biggest(folder).unlink(),
        lambda folder: biggest(folder).write_bytes(biggest(folder).read_bytes()[:1000]),
        lambda folder: (folder / "facts" / "metadata").write_text("{"),
    ],
    ids=["flipped bits", "file gone", "file cut", "facts torn"],
)
def test_a_damaged_one_is_put_aside_with_a_message(tmp_path, harm):
    save(tmp_path, {1: None, 2: None})
    harm(tmp_path / "2")
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, say=said.append)
    saved = checkpoints.restore_newest(abstract())
    assert saved is not None
    assert saved.step == 1
    (message,) = said
    assert "damaged-2" in message
    assert (tmp_path / "damaged-2").is_dir()
    checkpoints.save(2, arrays(2), {})  # its place is free again
    checkpoints.close()
    assert Checkpoints(tmp_path).restore(2, abstract()).step == 2


def test_other_arrays_and_values_that_changed_on_disk_are_refused(tmp_path):
    save(tmp_path, {1: None})
    other = {**abstract(), "trainable/score": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    with pytest.raises(RunError, match="cannot be read"):
        Checkpoints(tmp_path).restore(1, other)
    facts = tmp_path / "1" / "facts" / "metadata"
    stored = json.loads(facts.read_text())
    stored["checksums"]["opt/count"] += 1
    facts.write_text(json.dumps(stored))
    with pytest.raises(RunError, match="damaged: opt/count"):
        Checkpoints(tmp_path).restore(1, abstract())


def test_half_written_ones_are_cleared_away_and_other_files_left_alone(tmp_path):
    save(tmp_path, {1: None})
    (tmp_path / "2.orbax-checkpoint-tmp" / "arrays").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    saved = Checkpoints(tmp_path).restore_newest(abstract())
    assert saved is not None
    assert saved.step == 1
    assert not (tmp_path / "2.orbax-checkpoint-tmp").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.usefixtures("orbax_leftovers")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_none_and_only_damaged_ones_mean_a_fresh_start(tmp_path):
    assert Checkpoints(tmp_path / "new").restore_newest(abstract()) is None
    save(tmp_path, {1: None})
    flip(biggest(tmp_path / "1"))
    assert Checkpoints(tmp_path).restore_newest(abstract()) is None


def test_a_full_disk_is_one_clear_error_and_the_older_one_stays(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, arrays(1), {})
    checkpoints.wait()

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints.save(2, arrays(2), {"value": 0.0})
    monkeypatch.setattr(checkpoints._manager, "wait_until_finished", full)
    message = r"step 2: no space left on the device; the checkpoint of step 1 is kept.*same command"
    with pytest.raises(RunError, match=message):
        checkpoints.wait()
    assert checkpoints.best() is None


def test_sums_of_bits_do_not_depend_on_order_but_on_every_bit():
    values = arrays(5)["trainable/score"]
    assert checksums({"a": values}) == checksums({"a": values[::-1]})
    assert checksums({"a": values}) != checksums({"a": values.at[3, 4].multiply(-1)})


def test_flat_names_are_our_own_whatever_the_containers():
    import optax

    params = {"layers": {"q": jnp.ones((2, 3))}, "score": jnp.zeros(3)}
    tree = {"trainable": params, "opt": optax.adam(1e-3).init(params), "step": jnp.int32(1)}
    flat = flat_arrays(tree)
    assert "trainable/layers/q" in flat
    assert "opt/0/mu/layers/q" in flat
    back = from_flat(tree, flat)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True))


def test_only_failed_writes_that_were_reported_already_are_kept_out_of_the_log(tmp_path, caplog):
    Checkpoints(tmp_path).close()
    log = logging.getLogger("asyncio")
    full = ValueError('RESOURCE_EXHAUSTED: Error writing "opt/1" in OCDBT database: No space left on device')
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        log.error("Task exception was never retrieved", exc_info=full)
        log.error("Task exception was never retrieved", exc_info=ValueError("something else"))
        log.error("a slow callback")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["Task exception was never retrieved", "a slow callback"]
