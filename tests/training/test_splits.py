"""What is held out, and what must not be on both sides."""

import pytest

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, RunError
from prb_jax.training.config import default_config, load_settings
from prb_jax.training.splits import hold_out, read_training_data, user_weights
from tests.training.tiny import comparisons, rows, write_rows


def read(data, *overrides):
    return read_training_data(load_settings(default_config(), ["model=m", f"data={data}", *overrides]))


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "pairs.jsonl", rows(40))


def test_whole_users_are_held_out_where_there_are_users(data):
    found = read(data, "validation.fraction=0.25")
    assert found.split_by == "user"
    held, left = ({c.user_id for c in part} for part in (found.validation, found.train))
    assert len(held) == 2
    assert not held & left
    assert len(found.train) + len(found.validation) == 40


def test_comparisons_are_held_out_where_there_are_none(tmp_path):
    without = [{name: value for name, value in row.items() if name != "user_id"} for row in rows(40)]
    found = read(write_rows(tmp_path / "a.jsonl", without), "validation.fraction=0.25")
    assert found.split_by == "id"
    assert len(found.validation) == 10


def test_the_split_depends_on_names_alone():
    some = comparisons(40)
    first = hold_out(some, fraction=0.25, by="id")[1]
    again = hold_out(some[::-1], fraction=0.25, by="id")[1]
    assert {c.id for c in first} == {c.id for c in again}
    more = hold_out(comparisons(80), fraction=0.25, by="id")[1]
    assert len({c.id for c in more} & {c.id for c in first}) > 5  # most stay where they were


def test_one_is_always_held_out_and_one_left():
    two = comparisons(2)
    for fraction in (0.01, 0.99):
        train, validation = hold_out(two, fraction=fraction, by="id")
        assert (len(train), len(validation)) == (1, 1)
    with pytest.raises(DataError, match=r"validation.fraction=0 trains without"):
        hold_out(two[:1], fraction=0.1, by="id")


def test_records_are_split_as_a_file_and_known_by_their_contents(data):
    from_file = read(data, "validation.fraction=0.25")

    def given(records, validation=None, **options):
        settings = load_settings(None, ["model=m", "validation.fraction=0.25"], data_given=True)
        return read_training_data(settings, data=records, validation=validation, **options)

    found = given(row for row in rows(40))
    assert (found.train, found.validation) == (from_file.train, from_file.validation)
    assert found.sources == given(rows(40)).sources != given(rows(39)).sources
    own = [{**row, "id": f"v{row['id']}", "user_id": "v"} for row in rows(3)]
    assert [c.id for c in given(rows(40), own).validation] == ["vp0", "vp1", "vp2"]
    with pytest.raises(DataError, match="training and the validation data share 3 users"):
        given(rows(40), [{**row, "id": f"v{row['id']}"} for row in rows(3)])
    with pytest.raises(RunError, match=r"config key 'data': names '.*pairs.jsonl', but records are given"):
        read_training_data(load_settings(None, ["model=m", f"data={data}"]), data=rows(40))
    with pytest.raises(RunError, match="config key 'data'"):
        load_settings(None, ["model=m"])


def test_a_source_of_its_own_must_not_share_ids_or_users(tmp_path, data):
    own = write_rows(tmp_path / "own.jsonl", rows(3))
    with pytest.raises(DataError, match=r"training and the validation data share 3 ids \('p0', 'p1', 'p2'\)"):
        read(data, f"validation.data={own}")
    others = [{**row, "id": f"v{row['id']}"} for row in rows(3)]
    write_rows(own, others)
    with pytest.raises(DataError, match=r"share 3 users \('u0', 'u1', 'u2'\).*shared_users"):
        read(data, f"validation.data={own}")
    assert len(read(data, f"validation.data={own}", "validation.shared_users=true").validation) == 3
    write_rows(own, [{**row, "user_id": f"v{row['user_id']}"} for row in others])
    found = read(data, f"validation.data={own}")
    assert (found.split_by, len(found.train), len(found.validation)) == ("data", 40, 3)


def test_the_test_data_must_be_disjoint(tmp_path, data):
    test = write_rows(tmp_path / "test.jsonl", [{**row, "id": f"t{row['id']}"} for row in rows(8)])
    with pytest.raises(DataError, match="validation and the test data share 1 users"):
        read(data, f"validation.test={test}")
    assert read(data, f"validation.test={test}", "validation.shared_users=true").validation
    write_rows(test, rows(40)[:1])
    with pytest.raises(DataError, match="and the test data share 1 ids"):
        read(data, f"validation.test={test}", "validation.shared_users=true")
    write_rows(test, [{**row, "id": f"t{row['id']}", "user_id": "new"} for row in rows(8)])
    read(data, f"validation.test={test}")


def test_equal_labels_are_refused_with_their_line(tmp_path):
    found = rows(10)
    found[3] = {"id": "even", "question": "q?", "responses": ["a", "b"], "labels": [1, 1]}
    data = write_rows(tmp_path / "even.jsonl", found)
    with pytest.raises(DataError, match=r"even.jsonl:4: field 'labels': all equal to 1"):
        read(data)


def test_a_subset_that_is_empty_is_an_error(data):
    with pytest.raises(DataError, match="no subset 'Art'"):
        read(data, "subset=Art")


def test_several_sources_are_read_in_turn(tmp_path, data):
    other = write_rows(tmp_path / "other.jsonl", [{**row, "id": f"o{row['id']}"} for row in rows(5)])
    assert len(read(f"{data},{other}", "validation.fraction=0").train) == 45
    write_rows(other, rows(5))
    with pytest.raises(DataError, match="'p0' occurs in two of its sources"):
        read(f"{data},{other}")


def test_each_user_weighs_the_same():
    def of(name: str, user: str | None) -> Comparison:
        return Comparison(id=name, question="q", chosen="a", rejected="b", user_id=user)

    weights = user_weights([of("1", "u"), of("2", "u"), of("3", "u"), of("4", "v"), of("5", None)])
    assert weights.mean() == pytest.approx(1)
    assert weights[:3].sum() == pytest.approx(weights[3])
    assert weights[3] == pytest.approx(weights[4])
