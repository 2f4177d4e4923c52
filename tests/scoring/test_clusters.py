"""Over what the intervals of a run are taken: users, derived users, users and responses, comparisons."""

import csv
import math
from collections import Counter

import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import RunError
from prb_jax.metrics.accuracy import outcomes
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.uncertainty import accuracy_interval
from prb_jax.records.sources.personas import generate
from prb_jax.runs.clusters import read_clusters, write_clusters
from prb_jax.runs.finished import read_finished
from prb_jax.scoring.clusters import clusters_of
from tests.json_lines import write_lines
from tests.scoring.records import read_json


def record(i, *, user=None, posts=(), question="?", chosen="a", rejected="bb"):
    profile = [{"id": name, "category": "", "text": f"text of {name}"} for name in posts]
    row = {"id": str(i), "question": question, "chosen": chosen, "rejected": rejected, "profile": profile}
    return row if user is None else {**row, "user_id": user}


@pytest.fixture
def run(tmp_path, capsys):
    """Evaluate the length of responses on records, into a folder: its summary, and what is printed."""

    def run(records):
        words = ["--data", write_lines(tmp_path / "data.jsonl", records), "--out", str(tmp_path / "run")]
        assert cli.main(["evaluate", "baseline:length", *words, "--no-progress"]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return read_json(tmp_path / "run" / "summary.json"), " ".join(printed.out.split())

    return run


def test_users_are_derived_from_shared_posts(run, tmp_path):
    """A chain of shared posts is one person: p0-p1, p1-p2; rows without a profile are nobody's."""
    records = []
    for person in range(8):
        for i in range(6):
            posts = [f"{person}/p{i // 2}", f"{person}/p{i // 2 + 1}"]
            won = (person + i) % 3 > 0
            pair = {"chosen": "long one" if won else "x", "rejected": "x" if won else "long one"}
            records.append(record(f"{person}-{i}", posts=posts, question=f"{person} {i}", **pair))
    summary, printed = run([*records, record("nobody", question="n")])
    assert (summary["users"], summary["users_derived"], summary["crossed"]) == (8, True, None)
    assert "over users derived from shared profile posts" in summary["definitions"]["ci95"]
    assert "95 % interval over 8 users derived from shared posts" in printed
    kept = read_finished(tmp_path / "run")
    assert kept.clusters.derived
    assert len(set(kept.clusters.users)) == 9
    assert [row.user_id for row in kept.rows] == [None] * 49  # the rows hold what the data say
    with (tmp_path / "run" / "users.csv").open() as file:
        people = list(csv.DictReader(file))
    assert [user["comparisons"] for user in people] == ["6"] * 8
    assert (people[0]["user"], people[0]["accuracy"]) == ("derived-1", f"{4 / 6:.6g}")
    assert float(people[0]["ci95_low"]) < 4 / 6 < float(people[0]["ci95_high"])


def test_an_id_that_stands_for_several_texts_does_not_join_and_named_users_are_taken_as_they_are():
    rows = [
        prb.Comparison(**record(i, question=str(i)) | {"profile": [{"id": "1", "text": text}]})
        for i, text in enumerate(["I like tea.", "I like jazz.", "I like tea."])
    ]
    assert clusters_of(rows).users == ("derived-1", "derived-2", "derived-1")
    rows = [prb.Comparison(**record(i, user=user, posts=("p",))) for i, user in enumerate(["u", None, "v"])]
    clusters = clusters_of(rows)
    assert (clusters.users, clusters.derived) == (("u", None, "v"), False)


def test_crossed_data_are_recognised_and_named(run, tmp_path):
    rng = np.random.default_rng(0)
    records = []
    for item in range(40):
        texts = [f"an answer{'!' * int(rng.integers(1, 5))} {item}", f"another {item}"]
        for user in rng.choice(10, 3, replace=False):
            pair = dict(zip(("chosen", "rejected"), texts if rng.random() < 0.6 else texts[::-1]))
            records.append(record(len(records), user=f"u{user}", question=str(item), **pair))
    summary, printed = run(records)
    assert summary["crossed"] == {"clusters": 40, "by": "set of responses"}
    assert "over users and sets of responses" in summary["definitions"]["ci95"]
    assert "95 % interval over users and responses" in printed
    finished = read_finished(tmp_path / "run")
    two_way = accuracy_interval(outcomes(finished.rows).wins, finished.clusters)
    assert (two_way.method, summary["ci95"]) == ("two-way", two_way.bounds)
    other = prb.evaluate("baseline:random", tmp_path / "data.jsonl", out=tmp_path / "other").out
    compared = prb.compare(tmp_path / "run", other)
    assert {tuple(one["ci95"]) for one in compared["runs"]} > {tuple(summary["ci95"])}


def test_without_users_the_interval_is_over_comparisons(run, tmp_path):
    summary, printed = run([record(i, question=str(i), chosen="a" * (i % 3 + 1)) for i in range(30)])
    assert "95 % interval over comparisons" in printed
    assert "over users" not in printed
    assert not {"users.csv", "clusters.jsonl"} & {path.name for path in (tmp_path / "run").iterdir()}
    # what cannot be is a dash, not a zero
    overlap = summary["baselines"]["baseline:profile-overlap"]
    assert (overlap["accuracy"], overlap["difference"]) == (None, None)
    assert summary["baselines"]["baseline:length"]["difference"] is None
    assert "length (baseline) minus length" not in printed


@pytest.mark.parametrize("part", ["test-seen", "train"])
def test_on_the_generated_personas_the_interval_has_the_width_of_the_design(part):
    """A scorer that tosses a coin for each pair of answers: of two judges exactly one is right, of three one or two.

    So its accuracy varies by half a row for each group of three and one row for each slip, far less than if rows
    were independent. The true accuracy is 1/2, and the upper end stays below the Bayes accuracy.
    """
    benchmark = generate()
    comparisons = benchmark.parts[part]
    clusters = clusters_of(comparisons)
    assert clusters.responses is not None
    judges = Counter(clusters.responses).values()
    n = len(comparisons)
    truth = math.sqrt(sum(0.25 for count in judges if count == 3) + 0.02 * n) / n
    rng = np.random.default_rng(0)
    hits, widths, alone = 0, [], []
    for _ in range(60):
        coin = {text: bool(rng.random() < 0.5) for c in comparisons for text in [min(c.responses)]}
        wins = np.array([coin[min(c.responses)] == (c.responses[0] == min(c.responses)) for c in comparisons])
        low, high = accuracy_interval(wins, clusters).bounds or (0, 0)
        hits += low <= 0.5 <= high
        widths.append((high - low) / 2)
        assert high < benchmark.ceilings[part].user_blind_expected
        if len(alone) < 5:
            low, high = accuracy_interval(wins, Clusters(clusters.users)).bounds or (0, 0)
            alone.append((high - low) / 2)
    assert hits >= 55
    assert 1.8 * truth < np.mean(widths) < 2.8 * truth
    assert np.mean(alone) > 1.8 * np.mean(widths)


def test_rows_of_another_run_are_refused(tmp_path):
    rows = [ScoredRow(str(i), None, None, [1.0, 0.0], [1.0, 0.0]) for i in range(3)]
    write_clusters(tmp_path, rows, Clusters(("derived-1", "derived-1", None), derived=True))
    assert read_clusters(tmp_path, rows[::-1]).users == (None, "derived-1", "derived-1")
    with pytest.raises(RunError, match=r"clusters.jsonl: expected each comparison of this run"):
        read_clusters(tmp_path, rows[:2])
