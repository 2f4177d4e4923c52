import gzip
import json
import math
from itertools import pairwise

import numpy as np
import pytest

from prb_jax import cli
from prb_jax.errors import DataError, RunError
from prb_jax.records.intake import read_comparisons
from prb_jax.study.retrieval.rank_profiles import Query, bm25, rank_profiles, recency
from tests.records.sources.hub_layout import prb_tables, write_layout

WORDS = ("tea", "Rain", "bread", "hill", "soup", "chess", "letter")


def posts(*texts, **extra):
    return [{"id": f"p{i}", "category": f"c{i}", "text": text} | extra for i, text in enumerate(texts)]


def row(id, question, profile, **extra):
    return {"id": id, "question": question, "chosen": "a", "rejected": "b", "profile": profile} | extra


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in raw.decode().splitlines()]


def reference_bm25(question, texts, k1=1.5, b=0.75):
    """The textbook sum over the words of the question, post by post."""
    documents = [text.lower().split() for text in texts]
    average, scores = np.mean([len(document) for document in documents]), np.zeros(len(documents))
    for word in question.lower().split():
        df = sum(word in document for document in documents)
        idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
        for place, document in enumerate(documents):
            tf = document.count(word)
            scores[place] += idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * len(document) / average))
    return scores


def test_bm25_orders_as_the_formula_does():
    rng = np.random.default_rng(0)
    for _ in range(100):
        texts = [" ".join(rng.choice(WORDS, int(rng.integers(1, 9)))) for _ in range(int(rng.integers(1, 9)))]
        question = " ".join(rng.choice((*WORDS, "unknown"), 3))
        (order,) = bm25([Query("x", question, posts(*texts))])
        assert sorted(order) == list(range(len(texts)))
        assert (np.diff(reference_bm25(question, texts)[order]) <= 1e-9).all()
        for first, second in pairwise(order):
            if texts[first] == texts[second]:
                assert first < second  # equal posts keep their order


def test_bm25_by_hand():
    queries = [
        Query("x", "Soup?", posts("bread", "soup soup", "soup with bread and much else", "")),
        Query("x", "nothing of it", posts("bread", "soup")),
        Query("x", "soup", posts("", "")),
        Query("x", "soup", []),
    ]
    assert bm25(queries) == [[1, 2, 0, 3], [0, 1], [0, 1], []]


def test_recency():
    dated = [{"text": "a", "date": d} for d in ("2020-01-02", "2021-05-01", "2020-12-31", "2021-05-01")]
    numbers = [{"text": "a", "date": d} for d in (3, 1.5, 7)]
    orders = recency([Query("x", "q", profile) for profile in (dated, posts("a", "b", "c"), numbers)])
    assert orders == [[1, 3, 2, 0], [2, 1, 0], [2, 0, 1]]
    for dates, message in (
        ((1, "y"), r"x: field 'profile\[1\].date': expected a number, found 'y' \(str\)"),
        ((True,), r"field 'profile\[0\].date': expected a number, found True"),
        (("y", 1), r"field 'profile\[1\].date': expected a text, as the first post has, found 1"),
    ):
        with pytest.raises(DataError, match=message):
            recency([Query("x", "q", [{"text": "a", "date": date} for date in dates])])


def test_the_same_records_with_profiles_reordered(tmp_path, capsys):
    rows = [
        row("1", "soup?", posts("bread", "soup", "rain"), meta={"é": [1]}, user_id="u", source="s"),
        {"id": "2", "question": "q", "responses": ["a", "b"], "labels": [1, 0]},
        row("3", "rain?", posts("bread", "soup", "rain")),
    ]
    data = write(tmp_path / "x.jsonl", rows)
    for name in ("out.jsonl", "out.jsonl.gz"):
        out = tmp_path / "new" / name
        command = ["rank-profiles", "--encoder", "bm25", "--data", str(data), "--out", str(out)]
        assert cli.main(command) == 0
        captured = capsys.readouterr()
        assert captured.out == f"{out}: 3 comparisons, 2 with a ranked profile\n"
        assert captured.err.startswith("ranking by bm25: 0 of 3 profiles (0%)\n")
        assert "left, 3 of 3 profiles (100%), " in captured.err
        first, second, third = read(out)
        assert [post["id"] for post in first.pop("profile")] == ["p1", "p0", "p2"]
        assert first.pop("profile_order") == "bm25"
        assert first == {key: value for key, value in rows[0].items() if key != "profile"}
        assert second == rows[1]
        assert third["profile"][0] == rows[2]["profile"][2]
        before = out.read_bytes()
        assert cli.main(command) == 0  # as after a kill behind the last rename
        again = capsys.readouterr()
        assert again.out == captured.out
        assert again.err.endswith(f"prb: {out}: finished already by an earlier call\n")
        assert out.read_bytes() == before
        out.write_bytes(before[:-1])
        assert cli.main(command) == 2
        refusal = "exists already with other contents; remove it, or choose another name with --out\n"
        assert capsys.readouterr().err.endswith(f"prb: error: {out}: {refusal}")
        assert out.read_bytes() == before[:-1]
        out.unlink()
        rank_profiles(data, encoder="bm25", out=out, progress=False)
        assert out.read_bytes() == before
        assert capsys.readouterr().err == ""
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["out.jsonl", "out.jsonl.gz"]
    assert [c.id for c in read_comparisons(tmp_path / "new" / "out.jsonl")] == ["1", "2", "3"]


def test_the_papers_script_leaves_the_ids_where_they_are(tmp_path):
    data = write(tmp_path / "x.jsonl", [row("1", "soup?", posts("bread", "soup", "rain"))])
    rank_profiles(data, encoder="bm25", out=tmp_path / "out.jsonl", protocol="paper")
    (ranked,) = read(tmp_path / "out.jsonl")
    assert ranked["profile"] == [
        {"id": "p0", "category": "c1", "text": "soup"},
        {"id": "p1", "category": "c0", "text": "bread"},
        {"id": "p2", "category": "c2", "text": "rain"},
    ]


def test_what_cannot_be_ranked(tmp_path, capsys):
    data = write(tmp_path / "x.jsonl", [row("1", "q", posts("a")), row("2", "q", [{"id": "p"}])])
    out = tmp_path / "out.jsonl"
    good = write(tmp_path / "good.jsonl", [row("1", "q", posts("a"))])
    with pytest.raises(DataError, match="encoder 'none': expected bm25, recency, a model folder"):
        rank_profiles(data, encoder="none", out=out)
    with pytest.raises(DataError, match="mesh, max_length: for encoders that are models, not for recency"):
        rank_profiles(data, encoder="recency", out=out, mesh="data=1", max_length=8)
    for source, place, error, message in (
        (data, out, DataError, r"x\.jsonl:2: field 'profile\[0\].text': missing"),
        (data, tmp_path / "out.txt", RunError, r"out\.txt: expected a name ending in \.jsonl"),
        (data, data, RunError, "exists already"),
        (good, good / "out.jsonl", RunError, "cannot write"),
    ):
        with pytest.raises(error, match=message):
            rank_profiles(source, encoder="bm25", out=place)
    assert not out.exists()
    assert cli.main(["rank-profiles", "--encoder", "x", "--data", str(data), "--out", str(out)]) == 2


def test_what_a_killed_call_left_is_removed_by_the_next(tmp_path):
    left = tmp_path / ".out.jsonl.tmp"
    left.write_text("half a row")
    with pytest.raises(DataError):
        rank_profiles(tmp_path / "absent.jsonl", encoder="bm25", out=tmp_path / "out.jsonl")
    assert not left.exists()


def test_other_sources_too(tmp_path):
    folder = write_layout(tmp_path / "hub", prb_tables(), readme=True)
    ranked = rank_profiles(folder, encoder="recency", out=tmp_path / "out.jsonl")
    before, after = read_comparisons(folder), read_comparisons(ranked.path)
    assert (ranked.records, ranked.profiles) == (9, 9)
    assert [c.profile for c in after] == [c.profile[::-1] for c in before]
    assert [c.rubric_aspects for c in after] == [c.rubric_aspects for c in before]
