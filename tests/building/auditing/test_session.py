"""Who is given what, what is kept, and what is refused: an audit without its server."""

import csv
import json
import random
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.building.auditing.folder import open_folder
from prb_jax.building.auditing.session import ClosedError, Session
from prb_jax.errors import DataError, PrbWarning, RunError
from prb_jax.reports.table import percent
from tests.building.auditing.pairs import HOSTILE, answer, good_side, write_pairs


class Clock:
    """Seconds that pass when a test says so."""

    now = 1e9

    def __call__(self) -> float:
        return self.now


@contextmanager
def opened(folder: Path, clock: Clock, *, secret: bytes = b"k" * 32, **options) -> Iterator[Session]:
    folder.mkdir(exist_ok=True)
    audit = open_folder(folder, **options)
    with closing(audit.open_database(write=True)) as database:
        yield Session(database, audit.inputs, lease=600, secret=secret, clock=clock)


def judge(session: Session, name: str, *, fit: Callable[[str], str] = str, **more) -> str | None:
    """Judge the next item by the side of the good response, or what `fit` makes of it; return its question, if any."""
    session.join(name)
    shown = session.current(name)
    if shown.task is None or shown.item is None:
        return None
    session.submit(name, shown.task, answer(fit(good_side(dict(shown.item))), **more))
    return shown.item["prompt"][0]["content"].split("?")[0]


def test_every_item_goes_to_n_people_also_when_some_leave(tmp_path):
    data, clock = write_pairs(tmp_path / "pairs.jsonl", 10), Clock()
    with opened(tmp_path / "a", clock, data=data, per_item=2, check_every=0) as session:
        session.join("gone")
        held = session.current("gone")
        assert (held.left, held.done) == (10, 0)
        first = [judge(session, "ana") for _ in range(10)]
        assert len(set(first)) == 10
        assert first[0] == held.item["prompt"][0]["content"].split("?")[0]  # begun items come first
        assert judge(session, "ana") is None
        *others, last = (judge(session, "ben") for _ in range(10))
        assert (len(set(others)), last) == (9, None)  # one is held by somebody who left
        clock.now += 601
        assert judge(session, "ben") == first[0]
        assert session.current("gone").task is None  # nothing was begun: nothing is lost
    with opened(tmp_path / "a", clock) as session:  # all is read again
        assert judge(session, "ben") is None
        assert session.current("gone").left == 0
    assert prb.audit_report(tmp_path / "a")["complete"] == 10


def test_a_begun_answer_is_kept_for_its_author(tmp_path):
    data, clock = write_pairs(tmp_path / "pairs.jsonl", 1), Clock()
    with opened(tmp_path / "a", clock, data=data, per_item=1) as session:
        for name in ("ana", "ben"):
            session.join(name)
        shown = session.current("ana")
        session.keep("ana", shown.task, {"quality": {}, "fit": "b", "comment": "begun"})
        assert session.current("ben").task is None
        clock.now += 601
        assert judge(session, "ben") is not None
        assert session.current("ana").draft["comment"] == "begun"
        assert judge(session, "ana") is not None  # one more than was planned
    assert prb.audit_report(tmp_path / "a")["judgements"] == 2


def test_judgements_are_taken_back_one_after_another(tmp_path):
    data, clock = write_pairs(tmp_path / "pairs.jsonl", 5), Clock()
    with opened(tmp_path / "a", clock, data=data, check_every=0) as session:
        judged = [judge(session, "ana", comment=f"={number}+cmd") for number in range(3)]
        open_now = session.current("ana")
        session.undo("ana")
        session.undo("ana")
        shown = session.current("ana")
        assert (shown.done, shown.draft["comment"]) == (1, "=1+cmd")
        with pytest.raises(ClosedError, match="no longer open"):
            session.submit("ana", 1, answer("a"))
        again = [judge(session, "ana", comment="new") for _ in range(2)]
        assert again == judged[1:]
        assert session.current("ana").task == open_now.task
        with pytest.raises(ClosedError, match="no judgement to take back"):
            session.undo(session.join("ben")[0])
    assert prb.audit_export(tmp_path / "a", out=tmp_path / "a.csv") == 3
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["comment"] for row in rows] == ["'=0+cmd", "new", "new"]
    report = prb.audit_report(tmp_path / "a")
    assert (report["judgements"], report["taken_back"]) == (3, 2)


def test_nothing_that_is_shown_tells_a_check_and_nobody_can_mend_one(tmp_path):
    data, clock = write_pairs(tmp_path / "pairs.jsonl", 8), Clock()
    gold = write_pairs(tmp_path / "gold.jsonl", 3, name="g")
    seen = []
    with opened(tmp_path / "a", clock, data=data, gold=gold, check_every=2) as session:
        session.join("ana")
        while (shown := session.current("ana")).task is not None:
            seen.append((shown.left, shown.done, shown.task))
            wrong = answer("b" if good_side(dict(shown.item)) == "a" else "a")
            session.submit("ana", shown.task, wrong)
            session.undo("ana")
            back = session.current("ana")
            session.submit("ana", back.task, answer(good_side(dict(back.item))))
        assert shown.left == 0
    assert {left for left, _, _ in seen} == {10}
    assert [done for _, done, _ in seen] == list(range(len(seen)))
    report = prb.audit_report(tmp_path / "a")
    (ana,) = report["annotators"]
    assert (ana["gold_right"], ana["gold"]) == (0, report["checks"] - ana["again"])
    assert ana["again_same"] == 0 < ana["again"] + ana["gold"]
    assert report["fit"]["label"]["value"] == 1.0


def test_gold_and_repeated_items_tell_of_attention_alone(tmp_path):
    data, clock = write_pairs(tmp_path / "pairs.jsonl", 40), Clock()
    gold = write_pairs(tmp_path / "gold.jsonl", 4, name="g")
    with opened(tmp_path / "a", clock, data=data, gold=gold, per_item=2, check_every=3) as session:
        clock.now += 7
        while judge(session, "careful") is not None:
            clock.now += 7
        rng = random.Random(1)
        while judge(session, "careless", fit=lambda good: rng.choice("ab")) is not None:
            pass
    report = prb.audit_report(tmp_path / "a")
    careful, careless = report["annotators"]
    assert (careful["gold_right"], careful["gold"]) == (4, 4)
    assert careful["again_same"] == careful["again"] > 2
    assert careless["gold_right"] + careless["again_same"] < careless["gold"] + careless["again"]
    assert report["judgements"] == 80
    assert report["checks"] == sum(person["gold"] + person["again"] for person in (careful, careless))
    assert 5 < careful["chose_a"] < careful["chose"] - 5  # the sides are drawn by lot
    reasons = Counter(item["reasons"][0] for item in report["adjudication"])
    disputed = sum(item["dispute"] == 0.5 for item in report["adjudication"])
    assert all(item["question"].startswith("Question ") for item in report["adjudication"])
    assert reasons["the annotators disagree about the personal fit"] == disputed
    for text in (
        "2 annotators judged 40 pairs (80 judgements)",
        "attention checks were passed",
        "Krippendorff",
    ):
        assert text in report["sentence"], report["sentence"]


def test_tokens_belong_to_one_annotator_of_one_audit(tmp_path):
    data, clock = write_pairs(tmp_path / "pairs.jsonl", 1), Clock()
    with opened(tmp_path / "a", clock, data=data) as session:
        _, ana = session.join("  ana  \t b ")
        _, ben = session.join("ben")
        assert (session.annotator(ana), session.annotator(ben)) == ("ana b", "ben")
        others = ("2" + ana[1:], "0" + ana[1:], f"-{ana}", "\u0661" + ana[1:])
        for token in ("", "1", ana[:-1], "1.\ud800", *others):
            assert session.annotator(token) is None, token
    with opened(tmp_path / "a", clock, secret=b"j" * 32) as session:
        assert session.annotator(ana) is None


@pytest.fixture
def audited(tmp_path) -> Path:
    """An audit with three judgements."""
    data = write_pairs(tmp_path / "pairs.jsonl", 5)
    with opened(tmp_path / "a", Clock(), data=data, check_every=0) as session:
        for _ in range(3):
            judge(session, "ana")
    return tmp_path / "a"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE events SET answer = replace(answer, '3', '5') WHERE number = 2", "judgement 2 was changed"),
        ("DELETE FROM events WHERE number = 2", "judgement 2 was changed, added or removed by hand"),
        ("DELETE FROM events WHERE number = 3", "2 judgements, expected the 3 that were written"),
        ("UPDATE events SET item = 99 WHERE number = 1", "judgement 1 was changed, added or removed by hand"),
        ("UPDATE items SET shown = replace(shown, 'good', 'bad')", "table items was changed by hand"),
        ("UPDATE meta SET value = '4' WHERE name = 'events'", "expected the 4 that were written"),
        ("DELETE FROM meta", "table meta was changed by hand"),
        ("UPDATE meta SET value = 'x' WHERE name = 'audit'", "audit.db: of another audit, 'x'"),
        ("DROP TABLE events", "no such table: events"),
        ("PRAGMA application_id = 1", "not a database of `prb audit`"),
        ("PRAGMA user_version = 7", "format 7; this version reads format 1"),
    ],
)
def test_a_database_that_was_changed_by_hand_is_refused(audited, change, message):
    with sqlite3.connect(audited / "audit.db") as connection:
        connection.execute(change)
    connection.close()
    before = (audited / "audit.db").read_bytes()
    for work in (lambda: prb.audit_report(audited), lambda: prb.audit(audited, port=0)):
        with pytest.raises(RunError, match=r"audit\.db") as error:
            work()
        assert message in str(error.value)
    assert (audited / "audit.db").read_bytes() == before


def test_other_files_that_were_changed_are_refused(audited, tmp_path):
    record = json.loads((audited / "audit.json").read_text())
    for change, message in (
        (record | {"inputs": record["inputs"] | {"margin": 2.0}}, "settings were changed by hand"),
        (record | {"inputs": {}}, "field 'data': expected an object, found nothing"),
        (record | {"id": "other"}, "of another audit"),
        (record | {"kind": "x"}, "not a record of `prb audit`"),
    ):
        (audited / "audit.json").write_text(json.dumps(change))
        with pytest.raises(RunError, match="audit") as error:
            prb.audit_report(audited)
        assert message in str(error.value)
    (audited / "audit.json").write_text(json.dumps(record))
    data = tmp_path / "pairs.jsonl"
    text = data.read_text()
    data.write_text(text.replace("Question 1", "Question one"))
    for work in (lambda: prb.audit_report(audited), lambda: prb.audit(audited, data=data, port=0)):
        with pytest.raises(DataError, match=r"changed since .* began"):
            work()
    data.unlink()
    with pytest.warns(PrbWarning, match="the audit uses its own copy of the pairs"):
        assert prb.audit_report(audited)["judgements"] == 3
    data.write_text(text)
    (audited / "audit.db").write_bytes(b"no database")
    with pytest.raises(RunError, match="not a database"):
        prb.audit_report(audited)
    (audited / "audit.db").unlink()
    with pytest.raises(RunError, match=r"audit\.db: no such file"):
        prb.audit_report(audited)


def test_what_is_no_audit_is_refused(tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 3)
    four = tmp_path / "four.jsonl"
    four.write_text('{"id": "x", "question": "?", "responses": ["a", "b", "c"], "labels": [1, 0, 0]}')
    for given, message in (
        ({}, "found no audit: for a new one, name the pairs with --data"),
        ({"data": four}, "comparison 'x': 3 responses; people judge pairs: expected 2"),
        ({"data": pairs, "sample": 4}, "sample: 4 of 3 comparisons"),
        ({"data": pairs, "gold": pairs}, "is both in the data and in the gold items"),
        ({"data": pairs, "per_item": 0}, "per_item: expected 1 or more, found 0"),
        ({"data": pairs, "lease": 0}, "lease: expected a number of minutes above 0, found 0"),
        ({"data": pairs, "annotators": ["a\x00"]}, "field 'name': expected 1 to 60 printable characters"),
    ):
        with pytest.raises(prb.PrbError) as error:
            prb.audit(tmp_path / "a", port=0, **given)
        assert message in str(error.value)
    with pytest.raises(RunError, match=r"found no audit: the folder has no audit\.json"):
        prb.audit_report(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"expected a name that ends in \.jsonl or \.csv"):
        prb.audit_export(tmp_path / "a", out=tmp_path / "x.txt")
    report = prb.audit_report(tmp_path / "a")  # the last one above made it
    assert report["sentence"] == "Nobody has judged anything yet."
    assert report["fit"]["label"]["value"] is None


def test_an_audit_that_was_killed_while_it_was_made_goes_on(tmp_path):
    data = write_pairs(tmp_path / "pairs.jsonl", 3)
    with opened(tmp_path / "a", Clock(), data=data, sample=2) as session:
        judge(session, "ana")
    staged = tmp_path / "a" / ".audit.db.new"
    (tmp_path / "a" / "audit.db").rename(staged)
    with opened(tmp_path / "a", Clock()) as session:
        assert session.current("ana").done == 1
    (tmp_path / "a" / "audit.json").unlink()
    (tmp_path / "a" / "audit.db").rename(staged)  # killed before there was a record: made anew
    with opened(tmp_path / "a", Clock(), data=data, sample=2) as session:
        assert session.annotators == []


def test_a_page_shows_the_report(tmp_path, capsys):
    """Its sentence has the figures of the report, and texts of the data stay text."""
    data, page = write_pairs(tmp_path / "pairs.jsonl", 8), tmp_path / "page.html"
    with opened(tmp_path / "audit", Clock(), data=str(data), per_item=2, check_every=0) as session:
        for name, fit in (("ana", str), ("ben", lambda side: "a")):
            while judge(session, name, fit=fit):
                pass
    report = prb.audit_report(tmp_path / "audit", out=page)
    text = page.read_text("utf-8")
    (answer,) = re.findall(r'<p class="answer">(.*?)</p>', text)
    label = report["fit"]["label"]
    assert answer.startswith(
        "2 annotators judged 8 of 8 pairs; the labelled response fits the person better in "
        f"{percent(label['value'], label['ci95'])} of their judgements; their agreement is "
    )
    assert "; its general quality differs by +0.000 [+0.000, +0.000] points from" in answer
    assert report["adjudication"]
    assert HOSTILE.split("\n")[0] not in text
    assert "For a paper" in text
    assert cli.main(["report", str(tmp_path / "audit"), "--out", str(page)]) == 2
    assert f"`prb audit {tmp_path / 'audit'} --report` shows it" in capsys.readouterr().err
    for words, message in (
        (["--out", "page.html"], "add --report"),
        (["--export", "a.csv", "--out", "page.html"], "--out: has no effect with --export"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["audit", str(tmp_path / "audit"), *words])
        assert message in capsys.readouterr().err
    with opened(tmp_path / "new", Clock(), data=str(data)):
        pass
    prb.audit_report(tmp_path / "new", out=page)
    assert '<p class="answer">Nobody has judged anything yet.</p>' in page.read_text("utf-8")
