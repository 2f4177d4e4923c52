"""Tokens on disk: scores and bytes as from the text, pages stored once, and one error for what does not fit."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from prb_jax import DataError, RunError, evaluate
from prb_jax.cli import main
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.sources.prepare import prepare
from prb_jax.scoring import write_tokens as writing
from prb_jax.scoring.reader import Reader
from prb_jax.scoring.write_tokens import TokensJob, write_store
from prb_jax.text.view import ViewOptions
from prb_jax.trees.token_store import COLUMNS, PAGE, open_store
from tests.json_lines import write_lines
from tests.scoring.records import read_json, record

COUNT, USERS = 60, 6
VIEW = {"profile_posts": 2, "max_length": 600}


def rows() -> list[dict]:
    rows = []
    for number in range(COUNT):
        user, responses = number % USERS, 2 + number % 2
        profile = [
            {"id": str(k), "category": "", "text": f"{user} {k} " + "tea rain " * 25} for k in range(2)
        ]
        fields = {"profile": profile, "user_id": f"u{user}", "labels": list(range(responses))}
        margin = {} if number % 5 else {"margin": number / 8}
        rows.append(record(number, responses).to_row() | fields | margin)
    del rows[41]["id"]
    rows[42] = dict(rows[41])  # equal, and without an id
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_lines(tmp_path_factory.mktemp("data") / "data.jsonl", rows()))


def job(folder: Path, data: Path, out: Path) -> TokensJob:
    prepared = prepare([str(data)], out=out).folder
    view = ViewOptions(profile_posts=VIEW["profile_posts"], max_length=VIEW["max_length"])
    return TokensJob(model=str(folder), loading=LoadOptions(), view=view, folder=prepared, part=16)


@pytest.fixture(scope="module")
def prepared(folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "out"
    write_store(job(folder, data, out), split="test")
    return out


def store_of(out: Path) -> Path:
    return next(out.rglob("store.json")).parent


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "copy")


def test_scores_are_those_of_the_text_and_no_text_is_read(model, data, prepared, tmp_path, monkeypatch):
    options = {**VIEW, "controls": "none", "progress": False}
    expected = evaluate(model, str(data), out=tmp_path / "text", **options)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("text was tokenised")

    monkeypatch.setattr(Reader, "encode_text", never)
    monkeypatch.setattr("prb_jax.records.sources.prepared.to_row", never)
    from_tokens = evaluate(model, str(prepared), out=tmp_path / "tokens", **options)
    text, tokens = ((tmp_path / name / "scores.jsonl").read_bytes() for name in ("text", "tokens"))
    assert text == tokens
    for figure in ("n", "accuracy", "ties", "mean_margin", "user_accuracy", "truncated", "length_baseline"):
        assert from_tokens.summary[figure] == expected.summary[figure], figure
    assert from_tokens.rows[42].id == f"{from_tokens.rows[41].id}#2"
    same = evaluate(model, str(prepared), limit=7, too_long="skip", **options)
    assert [row.id for row in same.rows] == [row.id for row in expected.rows[:7]]
    for row, other in zip(same.rows, expected.rows[:7], strict=True):
        np.testing.assert_allclose(row.scores, other.scores, atol=1e-5)
    # The run of one may be continued with the other: their data is the same.
    again = evaluate(model, str(prepared), out=tmp_path / "text", **options)
    assert list(again.rows) == list(expected.rows)
    monkeypatch.undo()
    blind = evaluate(model, str(prepared), out=tmp_path / "blind", progress=False, **VIEW)
    figures = blind.summary["controls"]["blind"]
    assert (figures["n"], figures["shown_otherwise"]) == (COUNT, COUNT)


def test_pages_of_a_profile_are_stored_once(model, data, prepared):
    store = open_store(store_of(prepared))
    trees = [store.tree(index) for index in range(len(store))]
    starts = store.arrays["response_starts"][:-1]
    tokens = store.arrays["prefix_lengths"] + np.add.reduceat(store.arrays["response_lengths"], starts)
    assert [tree.tokens for tree in trees] == tokens.tolist()
    whole = {
        tree.prefix[: k + PAGE].tobytes()
        for tree in trees
        for k in range(0, len(tree.prefix) - PAGE + 1, PAGE)
    }
    assert len(store.arrays["pages"]) <= len(whole) < len(store.arrays["page_numbers"]) / 4
    margins = [row.get("margin", np.nan) for row in rows()]
    np.testing.assert_array_equal(store.arrays["margins"], margins)


@pytest.mark.slow
def test_the_command_with_two_processes_writes_the_same_bytes(folder, data, prepared, tmp_path, capsys):
    view = [word for name, value in VIEW.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    out = ["--out", str(tmp_path / "out")]
    started = ["--model", str(folder), "--processes", "2"]
    assert main(["prepare", "--data", str(data), *out, *started, *view]) == 0
    assert f"{COUNT} comparisons" in capsys.readouterr().out
    assert contents(store_of(tmp_path / "out")) == contents(store_of(prepared))
    assert not list((tmp_path / "out").rglob("parts"))


def test_a_killed_command_goes_on_with_the_missing_parts(folder, data, prepared, tmp_path, monkeypatch):
    work = job(folder, data, tmp_path / "out")
    seen: list[int] = []
    whole = Reader.encode_text

    def killed(self: Reader, comparisons, *, view):
        seen.append(len(comparisons))
        if len(seen) == 4:
            raise KeyboardInterrupt
        return whole(self, comparisons, view=view)

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "encode_text", killed)
        with pytest.raises(KeyboardInterrupt):
            write_store(work, split="test")
        patch.setattr(writing, "_join", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        seen[:] = [0] * 9
        with pytest.raises(KeyboardInterrupt):
            write_store(work, split="test")
    assert sum(seen) == COUNT - 3 * 16
    part = next((tmp_path / "out").rglob("000001.npz"))
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(
        DataError,
        match=r"000001\.npz: cannot be read as arrays: File is not a zip file; remove it, and the same",
    ):
        write_store(work, split="test")
    part.unlink()
    write_store(work, split="test")
    assert contents(store_of(tmp_path / "out")) == contents(store_of(prepared))


def test_a_command_killed_behind_its_last_file_keeps_no_second_copy(
    folder, data, prepared, tmp_path, monkeypatch
):
    work = job(folder, data, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_store(work, split="test")
    assert list((tmp_path / "out").rglob("parts"))
    write_store(work, split="test")
    assert not list((tmp_path / "out").rglob("parts"))
    assert contents(store_of(tmp_path / "out")) == contents(store_of(prepared))


def test_a_full_disk_is_one_error(folder, data, tmp_path, monkeypatch):
    work = job(folder, data, tmp_path / "out")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(
            RunError, match=r"cannot write .*No space left on device; all finished work is kept"
        ):
            write_store(work, split="test")
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_other_models_views_and_data_are_refused_by_field(model, data, prepared, copy):
    for option, message in (
        ({"profile_posts": 1}, "profile_posts 2, expected 1"),
        ({"max_length": 700}, "max_length 600, expected 700"),
        ({"protocol": "paper"}, "protocol 'default', expected 'paper'"),
    ):
        with pytest.raises(DataError, match=message):
            evaluate(model, str(prepared), progress=False, **(VIEW | option))
    file = store_of(copy) / "store.json"
    facts = read_json(file)
    for field, value in (("data", []), ("key", {**facts["key"], "tokenizer": "sha256:0"})):
        file.write_text(json.dumps({**facts, field: value}))
        with pytest.raises(DataError, match="data" if field == "data" else "tokenizer 'sha256:0', expected"):
            evaluate(model, str(copy), progress=False, **VIEW)


DAMAGE = {
    "store.json": (lambda file: file.write_text("{"), "store.json: not valid JSON"),
    "tokens.npy": (lambda file: file.write_bytes(file.read_bytes()[:-8]), "tokens.npy: expected"),
    "labels.npy": (lambda file: file.unlink(), "labels.npy: cannot be read: No such file"),
    "users.npy": (
        lambda file: file.write_bytes(b"x" * file.stat().st_size),
        r"users\.npy: cannot be read as an array: .*pickled \(object\) data; prepare",
    ),
    "subsets.npy": (
        lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\x7f"),
        "subsets.npy: changed since",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_store_is_refused(model, copy, name):
    damage, message = DAMAGE[name]
    damage(store_of(copy) / name)
    with pytest.raises(DataError, match=message):
        evaluate(model, str(copy), progress=False, **VIEW)


def test_a_changed_token_and_a_foreign_store_are_refused(model, copy):
    path = store_of(copy)
    pages = (path / "pages.npy").read_bytes()
    (path / "pages.npy").write_bytes(pages[:-1] + bytes([pages[-1] ^ 1]))
    with pytest.raises(DataError, match=r"the tokens of comparison \d+ are damaged"):
        evaluate(model, str(copy), progress=False, **VIEW)
    facts = read_json(path / "store.json")
    for files in ([1], {"pages.npy": 3}, {"pages.npy": {"bytes": None}}):
        (path / "store.json").write_text(json.dumps({**facts, "files": files}))
        with pytest.raises(DataError, match=r"store\.json: files: no entry for pages\.npy"):
            evaluate(model, str(copy), progress=False, **VIEW)
    (path / "store.json").write_text(json.dumps({"kind": "something else"}))
    with pytest.raises(DataError, match="not written by `prb prepare --model`"):
        evaluate(model, str(copy), progress=False, **VIEW)
    assert set(COLUMNS) == {file.stem for file in path.glob("*.npy")}


def test_the_text_of_other_data_beside_the_tokens_is_refused(model, copy, tmp_path):
    """The control that leaves profiles out reads the text; a run that reads tokens alone does not need it."""
    other = [{**row, "profile": row["profile"][:1]} for row in rows()]
    path = write_lines(tmp_path / "data.jsonl", other)
    (text,) = prepare([path], out=tmp_path / "other").folder.glob("*.array_record*")
    shutil.copy(text, store_of(copy).parents[2])
    evaluate(model, str(copy), controls="none", progress=False, **VIEW)
    for scorer, options in ((model, {"controls": "blind", **VIEW}), ("baseline:length", {})):
        with pytest.raises(DataError, match=r"array_record.*: changed since it was prepared"):
            evaluate(scorer, str(copy), progress=False, **options)
