"""What is held out, what must not be on both sides, the order of the data, and the shapes a step is computed in."""

import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest

from prb_jax.errors import DataError, PrbWarning, RunError
from prb_jax.models.attention.choice import StreamAttention
from prb_jax.platform.meshes import make_mesh
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Held
from prb_jax.training.config import BatchSettings, default_config, load_settings
from prb_jax.training.data import Examples, Order, permutation, read_training_data, user_weights
from prb_jax.training.microbatches import Layout, labelled, plan_layout
from prb_jax.training.user_order import UserOrder
from prb_jax.trees.streams import StreamShape
from prb_jax.trees.tree import Tree, build_tree
from tests.training.small_batches import small_config
from tests.training.tiny import comparisons, rows, write_rows

PAIR = {"question": "?", "chosen": "a", "rejected": "b"}


def read(data, *overrides):
    return read_training_data(load_settings(default_config(), ["model=m", f"data={data}", *overrides]))


def records(data, validation=None, *overrides):
    settings = load_settings(None, ["model=m", "validation.fraction=0.25", *overrides], given=["data"])
    return read_training_data(settings, data=data, validation=validation)


def renamed(prefix: str, count: int, **changes):
    """Rows with other ids than those of :func:`rows`."""
    return [{**row, "id": f"{prefix}{row['id']}", **changes} for row in rows(count)]


def ids(examples: Examples) -> list[str]:
    return [one.id for one in examples.known]


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "pairs.jsonl", rows(40))


def test_whole_users_are_held_out_where_there_are_users_and_else_comparisons(data):
    by_user = read(data, "validation.fraction=0.25")
    held, left = ({c.user_id for c in part.known} for part in (by_user.validation, by_user.train))
    assert (by_user.split_by, len(held), held & left) == ("user", 2, set())
    assert len(by_user.train) + len(by_user.validation) == 40
    by_id = records([{**row, "user_id": None} for row in rows(40)])
    assert (by_id.split_by, len(by_id.validation)) == ("id", 10)


def test_the_split_depends_on_names_alone_and_leaves_one_on_each_side():
    def held(data, fraction: float = 0.25) -> set[str]:
        by_id = ("validation.by=id", f"validation.fraction={fraction}")
        return set(ids(records(data, None, *by_id).validation))

    first = held(rows(40))
    assert held(rows(40)[::-1]) == first
    assert len(held(rows(80)) & first) > 5  # most stay where they were
    for fraction in (0.01, 0.99):
        assert len(held(rows(2), fraction)) == 1
    with pytest.raises(DataError, match=r"validation.fraction=0 trains without"):
        held(rows(1), 0.1)


def test_records_are_split_as_a_file_and_known_by_their_contents(data):
    from_file = read(data, "validation.fraction=0.25")
    from_records = records(row for row in rows(40))
    for role in ("train", "validation"):
        assert getattr(from_records, role).comparisons == getattr(from_file, role).comparisons
    assert from_records.sources == records(rows(40)).sources != records(rows(39)).sources
    assert ids(records(rows(40), renamed("v", 3, user_id="v")).validation) == ["vp0", "vp1", "vp2"]
    with pytest.raises(RunError, match=r"config key 'data': names '.*pairs.jsonl', but records are given"):
        read_training_data(load_settings(None, ["model=m", f"data={data}"]), data=rows(40))
    with pytest.raises(RunError, match="config key 'data'"):
        load_settings(None, ["model=m"])


def test_a_source_of_its_own_must_not_share_ids_or_users(tmp_path, data):
    held_out = write_rows(tmp_path / "held_out.jsonl", rows(3))
    with pytest.raises(DataError, match=r"training and the validation data share 3 ids \('p0', 'p1', 'p2'\)"):
        read(data, f"validation.data={held_out}")
    write_rows(held_out, renamed("v", 3))
    with pytest.raises(DataError, match=r"share 3 users \('u0', 'u1', 'u2'\).*shared_users"):
        read(data, f"validation.data={held_out}")
    assert len(read(data, f"validation.data={held_out}", "validation.shared_users=true").validation) == 3
    write_rows(held_out, renamed("v", 3, user_id="v"))
    apart = read(data, f"validation.data={held_out}")
    assert (apart.split_by, len(apart.train), len(apart.validation)) == ("data", 40, 3)


def test_the_test_data_must_be_disjoint(tmp_path, data):
    test = write_rows(tmp_path / "test.jsonl", renamed("t", 8))
    with pytest.raises(DataError, match="validation and the test data share 1 users"):
        read(data, f"validation.test={test}")
    assert len(read(data, f"validation.test={test}", "validation.shared_users=true").validation)
    write_rows(test, rows(40)[:1])
    with pytest.raises(DataError, match="and the test data share 1 ids"):
        read(data, f"validation.test={test}", "validation.shared_users=true")
    write_rows(test, renamed("t", 8, user_id="new"))
    read(data, f"validation.test={test}")


def test_contents_on_both_sides_under_two_ids_are_told():
    profile = [{"text": "I drink tea."}]
    trained = [row | {"profile": profile} for row in rows(40)]
    told = "3 of 3 validation comparisons have the contents of a training comparison under another id"
    with pytest.warns(PrbWarning, match=rf"{told} \('vp0' is 'p0'\)"):
        records(trained, renamed("v", 3, user_id="v", profile=profile))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bare = [row | {"profile": []} for row in rows(40)]
        records(
            bare, renamed("v", 3, user_id="v", profile=[])
        )  # another person who judges the same responses
        records(trained, renamed("v", 3, user_id="v", profile=["I drink coffee."]))


def test_faults_of_sources_are_named(tmp_path, data):
    even = [*rows(3), {"id": "even", "question": "q?", "responses": ["a", "b"], "labels": [1, 1]}]
    with pytest.raises(DataError, match=r"even.jsonl:4: field 'labels': all equal to 1"):
        read(write_rows(tmp_path / "even.jsonl", even))
    with pytest.raises(DataError, match="no subset 'Art'"):
        read(data, "subset=Art")
    other = write_rows(tmp_path / "other.jsonl", renamed("o", 5))
    assert len(read(f"{data},{other}", "validation.fraction=0").train) == 45
    for again in (write_rows(other, rows(5)), data):
        with pytest.raises(DataError, match="'p0' occurs in two of its sources"):
            read(f"{data},{again}")


def test_each_user_weighs_the_same():
    users = ("u", "u", "u", "v", None, None)
    weights = user_weights([Comparison(**PAIR, id=str(n), user_id=user) for n, user in enumerate(users)])
    assert weights.mean() == pytest.approx(1)
    np.testing.assert_allclose(weights[3:] / weights[:3].sum(), 1, rtol=1e-6)


@pytest.mark.parametrize(("count", "per_step"), [(10, 4), (10, 10), (3, 8), (7, 1)])
def test_every_epoch_sees_every_comparison_once(count, per_step):
    order = Order(count, per_step, seed=3)
    seen = np.concatenate([order.step(step) for step in range(5 * count)])
    for epoch in range(len(seen) // count):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert order.epoch_of(count) == per_step


def test_a_step_is_a_function_of_seed_and_number_alone():
    order = Order(50, 8, seed=1)
    late = order.step(40)
    [order.step(step) for step in range(40)]
    np.testing.assert_array_equal(order.step(40), late)
    assert not np.array_equal(Order(50, 8, seed=2).step(40), late)
    assert not np.array_equal(permutation(50, 1, 0), permutation(50, 1, 1))
    # Fixed for all time: a run must be continued by later versions too.
    np.testing.assert_array_equal(permutation(8, 0, 0), [0, 2, 1, 5, 4, 3, 6, 7])


def test_an_epoch_of_users_sees_every_comparison_once_and_users_whole() -> None:
    sizes = [3, 5, 1, 9, 4, 4, 2, 21]
    users = [f"u{user}" for user, size in enumerate(sizes) for _ in range(size)] + [None] * 3
    of_users = [Comparison(**PAIR, id=str(n), user_id=user) for n, user in enumerate(users)]
    order = UserOrder(of_users, per_step=8, seed=1)
    assert order.split == 2
    steps, number = [], 0
    while order.seen(number) < len(users):
        steps.append(order.step(number))
        number += 1
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(users)))
    assert order.epoch_of(number) == 1.0
    assert max(map(len, steps)) <= 8
    assert len(steps) <= 9  # 52 comparisons: few places stay free
    for user, size in enumerate(sizes):
        parts = [sum(users[place] == f"u{user}" for place in step) for step in steps]
        assert sorted(part for part in parts if part) == {9: [4, 5], 21: [7, 7, 7]}.get(size, [size])
    late = UserOrder(of_users, per_step=8, seed=1)
    np.testing.assert_array_equal(late.step(3 * number), order.step(3 * number))
    second = [order.step(number + at) for at in range(number)]
    assert not all(np.array_equal(a, b) for a, b in zip(steps, second, strict=True))
    with pytest.raises(DataError, match="batch_by=user: no comparison of the training data has a user_id"):
        UserOrder(of_users[-3:], per_step=8, seed=1)


def tree(prefix: int, *responses: int) -> Tree:
    ids = tuple(np.arange(1, n + 1, dtype=np.int32) for n in responses)
    return Tree(np.arange(prefix, dtype=np.int32), ids, tuple(n - 1 for n in responses))


def layout_of(trees: list[Tree], together: list[np.ndarray], *, steps: int = 1, **batch: int) -> Layout:
    mesh = make_mesh(devices=jax.devices()[:1])
    attention = StreamAttention("by XLA", "blocks", one_length=False)
    options = {"config": small_config(), "mesh": mesh, "attention": attention}
    sizes = {"per_step": len(together[0]), "steps": steps, "batch": BatchSettings(**batch)}
    return plan_layout(Held(trees), together, **sizes, **options)


def test_every_member_of_a_step_is_in_one_stream_of_a_planned_shape():
    rng = np.random.default_rng(0)
    trees = [tree(int(rng.integers(0, 90)), *(int(n) for n in rng.integers(1, 40, 2))) for _ in range(60)]
    order = Order(60, 16, seed=0)
    together = [order.step(step) for step in range(12)]
    layout = layout_of(trees, together, steps=100, tokens=1024, max_buckets=3)
    assert 1 <= len(layout.shapes) <= 2
    needed = computed = 0
    for members in together:
        of_step = [trees[member] for member in members]
        parts = list(layout.microbatches(of_step))
        assert sorted(place for part in parts for group in part.groups for place in group) == list(range(16))
        for part in parts:
            assert StreamShape(part.batch.tokens.shape[1], part.rows) in layout.shapes
            assert part.batch.tokens.size <= 1024
            needed += part.tokens
            computed += part.batch.tokens.size
    assert 0 <= 1 - needed / computed < 0.6


def test_a_longer_run_affords_a_second_shape():
    """Five trees of 900 tokens fill five streams of 1,024; a sixth of 200 tokens wants a shorter one."""
    rng = np.random.default_rng(0)
    trees = [build_tree(np.split(rng.integers(3, 60, size), 2)) for size in (900, 900, 900, 900, 900, 200)]
    few, many = (
        len(layout_of(trees, [np.arange(6)], steps=steps, tokens=1024).shapes) for steps in (1, 100_000)
    )
    assert (few, many) == (1, 2)


def test_a_batch_masks_what_only_fills_up():
    """The places of a stream are those of its trees in their order; what the loss has of the others is nothing."""
    pairs, trees = comparisons(3), [tree(4, 3, 2), tree(2, 1, 6), tree(0, 2, 2)]
    pairs[0] = replace(pairs[0], margin=0.5)
    examples = Examples(pairs, pairs, trees=Held(trees), weights=np.asarray([1.0, 2.0, 3.0], np.float32))
    layout = layout_of(trees, [np.arange(3)])
    members = np.asarray([2, 0])
    (part,) = labelled(layout, examples, members, np.asarray([0, 1]))
    (group,), extras = part.groups, part.extras
    assert sorted(group) == [0, 1]
    assert extras.mask.shape == (1, part.rows, 2)
    assert part.rows > 2
    order = members[list(group)]
    np.testing.assert_array_equal(extras.mask[0].sum(axis=1), [2, 2] + [0] * (part.rows - 2))
    np.testing.assert_array_equal(extras.labels[0, :3], [[1, 0], [1, 0], [0, 0]])
    np.testing.assert_array_equal(extras.weights[0, :3], [*examples.weights[order], 0])
    np.testing.assert_array_equal(extras.margin[0, :3], [*[0.5 if one == 0 else 0 for one in order], 0])
    np.testing.assert_array_equal(extras.places[0, :2], [[0, 1], [2, 3]])
    read = part.batch.tokens[0, part.batch.reads[0, :4]]
    np.testing.assert_array_equal(read, [len(ids) for one in order for ids in trees[one].responses])
