"""Data sets of people, read from files in their public layouts."""

import copy
import itertools
import json
import warnings
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest

import prb_jax as prb
from prb_jax import plugins
from prb_jax.errors import DataError, PrbWarning, RunError
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.rows import ScoredRow
from prb_jax.records.benchmarks import get_benchmark, people, personalllm, rmgap
from prb_jax.records.benchmarks.benchmark import Benchmark, score_intervals
from prb_jax.records.benchmarks.evaluesteer import FAMILIES
from prb_jax.records.intake import benchmark_of, describe_source, each_comparison, read_comparisons
from prb_jax.records.items import Held
from prb_jax.records.sources.prepare import prepare
from prb_jax.records.sources.source import same_subset
from prb_jax.study.personalise import people_of_study
from prb_jax.study.population import read_population
from prb_jax.study.splits import check_wrappers, make_splits
from prb_jax.study.write_features import blank_features
from prb_jax.training.data import read_examples
from tests.json_lines import write_lines

from .layouts import coarse, write_hub
from .people_layouts import (
    STUDIES,
    WRITERS,
    World,
    alignx_rows,
    community_alignment_rows,
    evaluesteer_items,
    evaluesteer_rows,
    multipref_rows,
    personalllm_rows,
    personalrewardbench_rows,
    prism_rows,
    rmgap_rows,
)

CA, PRISM, PRB_PRISM = "community-alignment", "prism", "personalrewardbench-prism"

ROWS = {
    CA: community_alignment_rows,
    PRISM: lambda: prism_rows()[0],
    PRB_PRISM: personalrewardbench_rows,
    "rmgap": rmgap_rows,
    "multipref": multipref_rows,
    "evaluesteer": evaluesteer_items,
    "alignx": alignx_rows,
    "personalllm": personalllm_rows,
}


def write_published(name: str, rows: list, folder: Path) -> str:
    """Write rows as the one main file of a data set; return the name of the source."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == PRISM:
        write_lines(folder / "utterances.jsonl", rows)
        write_lines(folder / "survey.jsonl", prism_rows()[1])
        return f"{name}:{folder}"
    return f"{name}:{write_lines(folder / 'rows.jsonl', rows)}"


def read(name: str, rows: list, folder: Path) -> list[prb.Comparison]:
    return read_comparisons(write_published(name, rows, folder))


COUNTS = {
    CA: 18,
    PRISM: 12,
    PRB_PRISM: 8,
    "personalrewardbench-arena": 8,
    "rmgap": 96,
    "multipref": 14,
    "evaluesteer": 324,
    "alignx": 20,
    "personalllm": 6,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_layout_is_read_for_evaluation_training_and_studies(tmp_path, name):
    source = f"{name}:{WRITERS[name](tmp_path / 'data')}"
    comparisons = read_comparisons(source)
    assert len(comparisons) == COUNTS[name]
    for one in comparisons:
        posts = {post.text for post in one.profile}
        assert posts.isdisjoint(one.responses), "a profile tells the label"
        assert (one.user_id is None) == (name == "rmgap")
    trained = read_examples(source, "data")
    assert len(trained) == {PRB_PRISM: 8, "personalrewardbench-arena": 8, "personalllm": 3}.get(
        name, COUNTS[name]
    )
    assert trained.sources == [describe_source(source, split="train")]
    if name == "rmgap":
        with pytest.raises(DataError, match="no comparison names a user"):
            people_of_study(source, shots=(0, 1))
    else:
        larger = WRITERS[name](tmp_path / "larger", **STUDIES[name])
        reached = people_of_study(f"{name}:{larger}", shots=(0, 1))
        assert len(reached["unseen"]) > 8
        assert max(reached["unseen"]) >= 1
    benchmark = get_benchmark(name)
    assert benchmark.licence
    page = (Path(__file__).resolve().parents[3] / "docs" / "people.md").read_text(encoding="utf-8")
    assert f"`{name}`" in page
    assert (benchmark.repository or benchmark.home.partition(" (")[0].rpartition(" of ")[2]) in page


# Of the others, other rows decide what a row means.
@pytest.mark.parametrize("name", [name for name in ROWS if name not in (PRISM, PRB_PRISM)])
def test_rows_are_read_one_after_another(tmp_path, name):
    rows = ROWS[name]()
    source = write_published(name, [*rows, "no object"], tmp_path)
    first = list(itertools.islice(each_comparison(source), 2))
    assert [one.id for one in first] == [one.id for one in read(name, rows, tmp_path / "whole")[:2]]
    with pytest.raises(DataError, match=rf"rows.jsonl:{len(rows) + 1}: expected an object with fields"):
        read_comparisons(source)


@pytest.mark.parametrize("name", ROWS)
def test_a_prepared_copy_and_records_of_ours_are_read_as_they_are(tmp_path, name):
    comparisons = read(name, ROWS[name](), tmp_path / "rows")
    path = write_lines(tmp_path / "ours.jsonl", [one.to_row() for one in comparisons])
    assert read_comparisons(f"{name}:{path}") == comparisons
    strange = write_lines(tmp_path / "strange.jsonl", [{"a": 1, "b": 2}])
    with pytest.raises(
        DataError, match=rf"strange.jsonl:1: no record of {name}: expected the columns .*, found a, b"
    ):
        read_comparisons(f"{name}:{strange}")


def broken(name, change):
    """The rows of a layout, with the second one changed."""
    rows = ROWS[name]()
    change(rows[1])
    return rows


BROKEN = [
    (
        CA,
        {"first_turn_preferred_response": "response_e"},
        "2: field 'first_turn_preferred_response': expected one of",
    ),
    (CA, {"annotator_id": ""}, "2: field 'annotator_id': empty"),
    (CA, {"in_balanced_subset": "perhaps"}, "2: field 'in_balanced_subset': expected true or false"),
    (CA, {"first_turn_response_b": 7}, "2: field 'first_turn_response_b': expected a string"),
    (PRISM, {"score": "high"}, "2: field 'score': expected a number, found 'high'"),
    (PRISM, {"score": 140}, "2: field 'score': expected a number from 1 to 100, found 140"),
    (PRISM, {"user_id": "user3"}, "2: field 'user_id': expected 'user0', as before in this conversation"),
    (PRISM, {"turn": 0.5}, "2: field 'turn': expected a whole number"),
    (PRISM, {"if_chosen": None}, "2: field 'if_chosen': expected true or false"),
    (PRB_PRISM, {"rejected": "text"}, "2: field 'rejected': expected an object"),
    (
        PRB_PRISM,
        {"rejected": {"role": "user", "content": "x"}},
        "2: field 'rejected.role': chosen and rejected are of",
    ),
    (PRB_PRISM, {"split": None}, "2: field 'split': missing"),
    (PRB_PRISM, {"split": "TEST"}, "2: field 'split': expected one of train, val, test, .*, found 'TEST'"),
    (PRB_PRISM, {"context": 3}, "2: field 'context': expected a list"),
    ("rmgap", {"domain": "Sports"}, "2: field 'domain': expected one of Chat"),
    ("rmgap", {"responses": []}, "2: field 'responses': expected 4, found 0"),
    ("multipref", {"completion_b": None}, "2: field 'completion_b': missing"),
    (
        "multipref",
        {"expert_worker_annotations": [{}]},
        r"2: field 'expert_worker_annotations\[0\].evaluator': missing",
    ),
    ("evaluesteer", {"statement_1": " "}, "2: field 'statement_1': empty; expected what the user says"),
    ("evaluesteer", {"statement_2": None}, "2: field 'statement_2': missing"),
    ("alignx", {"rejected": None}, "2: field 'rejected': missing"),
    (
        "alignx",
        {"User-Generated Content": [{"prompt": "x"}]},
        r"2: field 'User-Generated Content\[0\].comment'",
    ),
    (
        "personalllm",
        {"response_2_beaver_7b": None},
        "2: field 'response_2_beaver_7b': expected a number, found null",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), BROKEN)
def test_a_broken_row_is_named(tmp_path, name, change, message):
    with pytest.raises(DataError, match=rf"\.jsonl:{message}"):
        read(name, broken(name, lambda row: row.update(change)), tmp_path)


RENAMED = {
    CA: "annotator_country",
    PRISM: "conversation_type",
    "multipref": "category",
    "alignx": "Pair-wise Comparative Feedback",
}


@pytest.mark.parametrize("name", RENAMED)
def test_a_column_with_another_name_is_told(tmp_path, name):
    """A cell may be empty; a column that no row has may have another name in the file."""
    rows = ROWS[name]()
    with warnings.catch_warnings(record=True) as before:
        warnings.simplefilter("always")
        read(name, rows, tmp_path / "right")
    assert not any(
        "columns that no row has" in str(one.message) and RENAMED[name] in str(one.message) for one in before
    )
    for row in rows:
        row["renamed"] = row.pop(RENAMED[name], None)
    with pytest.warns(PrbWarning, match=f"columns that no row has, read as empty: .*{RENAMED[name]}"):
        read(name, rows, tmp_path / "renamed")


def test_published_rows_with_our_columns_are_no_records_of_ours(tmp_path):
    rows = alignx_rows()
    for row in rows:
        del row["Preference Direction"]
    with pytest.raises(
        DataError, match="1: no record of alignx: expected the columns Preference Direction, found"
    ):
        read("alignx", rows, tmp_path)
    rows = alignx_rows()
    rows[0]["User-Generated Content"][0]["comment"] = " "
    with pytest.warns(PrbWarning, match="left out: comments without a text: 1"):
        read("alignx", rows, tmp_path)


def test_other_broken_rows(tmp_path):
    def one_winner_less(row):
        row["prompt_groups"][2]["winner"] = "Z"

    with pytest.raises(
        DataError, match=r"2: field 'prompt_groups\[2\].winner': expected a key of responses \(A, B"
    ):
        read("rmgap", broken("rmgap", one_winner_less), tmp_path / "a")

    def another_level(row):
        row["normal_worker_annotations"][0]["overall_pref"] = "A"

    message = r"2: field 'normal_worker_annotations\[0\].overall_pref': expected one of A-is-clearly-better"
    with pytest.raises(DataError, match=message):
        read("multipref", broken("multipref", another_level), tmp_path / "b")
    rows = evaluesteer_rows()
    rows[1]["style_2"] = "warm"
    with pytest.raises(DataError, match="2: field 'style_1': expected none, or opposite styles"):
        read("evaluesteer", rows, tmp_path / "c")
    write_lines(tmp_path / "d.jsonl", prism_rows()[0])
    with pytest.raises(
        DataError, match=r"d.jsonl: prism also needs \*\*/survey.jsonl\*: expected a folder with both"
    ):
        read_comparisons(f"prism:{tmp_path / 'd.jsonl'}")
    source = write_published(PRISM, prism_rows()[0], tmp_path / "e")
    write_lines(tmp_path / "e" / "survey.jsonl", prism_rows()[1][1:])
    with pytest.raises(
        DataError, match=r"utterances.jsonl:1: field 'user_id': 'user0' is not in the table survey"
    ):
        read_comparisons(source)


@pytest.mark.parametrize("name", WRITERS)
def test_without_the_hub_it_says_where_the_file_is(monkeypatch, name):
    def unreachable(*args, **options):
        raise ConnectionError("Couldn't reach the Hub")

    for function in ("load_dataset", "get_dataset_config_names", "get_dataset_split_names"):
        monkeypatch.setattr(datasets, function, unreachable)
    with pytest.raises(DataError, match=rf"--data {name}:FOLDER") as error:
        read_comparisons(name)
    benchmark = get_benchmark(name)
    assert (benchmark.repository or "github.com/") in str(error.value)
    if benchmark.repository:
        assert benchmark.licence.partition(";")[0] in str(error.value)


def test_from_the_hub_by_config_and_split(monkeypatch, hub_of, tmp_path):
    tables = dict(zip(("utterances", "survey"), prism_rows(), strict=True))
    for config, rows in tables.items():
        write_hub(tmp_path / config, {"train": rows})
    asked, load = [], datasets.load_dataset

    def load_config(path, name=None, **options):
        asked.append((path, name, options["split"]))
        return load(str(tmp_path / name), split=options["split"], cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_config)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda path: ["metadata", *tables])
    from_hub = read_comparisons("prism")
    assert asked == [("HannahRoseKirk/prism-alignment", name, "train") for name in tables]
    assert from_hub == read(PRISM, tables["utterances"], tmp_path / "files")


def test_every_split_of_the_hub_is_read_for_the_history(monkeypatch, hub_of, tmp_path):
    rows = personalrewardbench_rows()
    asked = hub_of(write_hub(tmp_path / "hub", {"train": rows[::2], "test": rows[1::2]}))
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda path: ["default"])
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, config: ["train", "test"])
    comparisons = read_comparisons("personalrewardbench-arena")
    assert {split for _, _, split in asked} == {"train", "test"}
    of_rows = {(row["chosen"]["content"], row["user_id"]) for row in rows if row["split"] == "test"}
    assert {(one.responses[0], one.user_id) for one in comparisons} == of_rows


# What each data set means.


def test_community_alignment_turns_profiles_and_traps(tmp_path):
    rows = community_alignment_rows()
    world = World()
    comparisons = {one.id.partition("@")[0]: one for one in read(CA, rows, tmp_path)}
    for row in rows:
        for number, turn in enumerate(("first", "second"), start=1):
            if row[f"{turn}_turn_prompt"] is None:
                continue
            one = comparisons[f"{row['conversation_id']}/{number}"]
            texts = [
                row[f"{turn}_turn_response_{letter}"].removesuffix("<|end_of_text|>") for letter in "abcd"
            ]
            assert list(one.responses) == texts
            assert texts[one.labels.index(1.0)] == texts[world.best(row["annotator_id"], texts)]
            assert sum(one.labels) == 1.0
            assert [message.role for message in one.prompt] == ["user", "assistant", "user"][: 2 * number - 1]
    first, second = comparisons["c11/1"], comparisons["c11/2"]
    assert second.prompt[1].content == first.responses[first.labels.index(1.0)]
    assert first.profile == second.profile  # no turn of its own conversation
    assert [(post.category, post.text) for post in first.profile[:2]] == [
        ("about this person", "age: 18-34; gender: female; education level: Other; country: india"),
        ("asked", "Question 0 of turn 0?"),
    ]
    assert (
        Counter(post.category for post in first.profile)["agreed_with"] == 4
    )  # of two earlier conversations
    assert comparisons["c0/1"].profile[0].category == "about this person"
    assert len(comparisons["c0/1"].profile) == 1
    assert {one.subset for one in comparisons.values()} == {
        "it/balanced", "en/balanced", "it/not balanced", "en/not balanced",
    }  # fmt: skip
    some = read_comparisons(f"{CA}:{tmp_path / 'rows.jsonl'}", subset="en")
    assert {one.subset for one in some} == {"en/balanced", "en/not balanced"}
    assert same_subset("en/balanced", "balanced")
    assert not same_subset("en/not balanced", "balanced")


def test_community_alignment_as_csv_with_empty_cells(tmp_path):
    import csv

    rows = community_alignment_rows()
    with (tmp_path / "community_alignment.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert read_comparisons(f"{CA}:{tmp_path / 'community_alignment.csv'}") == read(
        CA, rows, tmp_path / "lines"
    )


def test_community_alignment_counts_what_it_leaves_out(tmp_path):
    rows = community_alignment_rows(people=6, each=2)
    full = rows[6]  # one turn
    cells = ("prompt", "preferred_response", *(f"response_{letter}" for letter in "abcd"))
    cases = {
        "turns with an empty response": {
            "first_turn_response_a": "EMPTY STRING",
            "first_turn_preferred_response": "response_b",
        },
        "turns that offer a response twice": {"first_turn_response_a": full["first_turn_response_b"]},
        "turns without a preferred response": {"first_turn_preferred_response": ""},
        "turns without a prompt": {"first_turn_prompt": None},
        "turns after an empty one": {f"third_turn_{cell}": full[f"first_turn_{cell}"] for cell in cells},
    }
    marks = r"ends with <\|end_of_text\|> \(removed\): 72, EMPTY STRING \(read as empty\): 12"
    with pytest.warns(PrbWarning, match=f"rows.jsonl: texts: {marks}$"):
        before = len(read(CA, rows, tmp_path))
    for reason, change in cases.items():
        changed = copy.deepcopy(rows)
        changed[6].update(change)
        with pytest.warns(PrbWarning, match=f"left out: {reason}: 1$"):
            left = read(CA, changed, tmp_path)
        assert len(left) == before - (reason != "turns after an empty one")
    two = copy.deepcopy(rows)
    two[7]["first_turn_preferred_response"] = None  # what came after it is not known either
    message = "turns without a preferred response: 1, turns after one that cannot be read: 1"
    with pytest.warns(PrbWarning, match=message):
        assert len(read(CA, two, tmp_path)) == before - 2


def test_a_profile_holds_no_earlier_choice_between_the_same_responses(tmp_path):
    rows = community_alignment_rows(people=1, each=4)
    for name in (f"response_{letter}" for letter in "abcd"):
        rows[2][f"first_turn_{name}"] = rows[0][f"first_turn_{name}"]
    rows[2]["first_turn_preferred_response"] = rows[0]["first_turn_preferred_response"]
    by_id = {one.id.partition("@")[0]: one for one in read(CA, rows, tmp_path)}
    asked = [post.text for post in by_id["c2/1"].profile if post.category == "asked"]
    assert asked == ["Question 1 of turn 0?", "Question 1 of turn 1?"]
    assert "Question 0 of turn 0?" in [post.text for post in by_id["c3/1"].profile]


def test_a_profile_stays_the_same_once_it_is_full(tmp_path):
    comparisons = read(CA, community_alignment_rows(people=1, each=12), tmp_path)
    *_, before, last = comparisons
    assert last.profile == before.profile
    assert sum(post.category == "agreed_with" for post in last.profile) == people.CHOICES


def test_prism_scores_turns_and_survey(tmp_path):
    utterances, _ = prism_rows()
    for row in utterances:
        row["score"] = str(row["score"])  # stored as text
    shuffled = [utterances[place] for place in np.random.default_rng(0).permutation(len(utterances))]
    comparisons = {one.id: one for one in read(PRISM, shuffled, tmp_path)}
    for (name, turn), group in itertools.groupby(
        utterances, lambda row: (row["conversation_id"], row["turn"])
    ):
        members = {row["model_response"]: float(row["score"]) for row in group}
        one = comparisons[f"{name}/{turn}"]
        assert dict(zip(one.responses, one.labels, strict=True)) == members
    assert [message.role for message in comparisons["c7/1"].prompt] == ["user", "assistant", "user"]
    chosen = [
        row["model_response"] for row in utterances if row["conversation_id"] == "c7" and row["if_chosen"]
    ]
    assert comparisons["c7/1"].prompt[1].content == chosen[0]
    told = [(post.category, post.text) for post in comparisons["c1/0"].profile[:3]]
    assert told == [
        ("self-description", "I am person 1."),
        ("wish for the assistant", "Be brief."),
        ("about this person", "age: 25-34 years old; gender: Male"),
    ]
    assert comparisons["c1/0"].subset == "values guided"


def test_prism_counts_what_it_leaves_out(tmp_path):
    utterances, _ = prism_rows()
    place = next(i for i, row in enumerate(utterances) if row["conversation_id"] == "c1" and row["turn"] == 0)

    def left_out(message, count, **changes):
        rows = copy.deepcopy(utterances)
        for offset, change in enumerate(changes["rows"]):
            rows[place + offset].update(change)
        with pytest.warns(PrbWarning, match=f"left out: {message}"):
            assert len(read(PRISM, rows, tmp_path)) == 12 - count

    left_out("turns with one score for all responses: 1", 1, rows=[{"score": 50}] * 4)
    left_out(
        "turns with an empty response: 1", 1, rows=[{"model_response": "EMPTY STRING", "if_chosen": False}]
    )
    left_out("turns after one without a chosen response: 1", 1, rows=[{"if_chosen": False}] * 4)
    same = utterances[place + 1]["model_response"]
    left_out(
        "turns that offer a response twice: 1",
        1,
        rows=[{"model_response": same, "if_chosen": utterances[place + 1]["if_chosen"]}],
    )
    low = [{"if_chosen": int(utterances[place + i]["score"]) == 7} for i in range(4)]
    left_out("turns whose chosen response has not the highest score: 1", 1, rows=low)


def test_personalrewardbench_shows_the_training_pairs_alone(tmp_path):
    rows = personalrewardbench_rows()
    source = write_published(PRB_PRISM, rows, tmp_path)
    comparisons = read_comparisons(source)
    for one in comparisons:
        history = [row for row in rows if row["split"] == "train" and row["user_id"] == one.user_id]
        agreed = [post.text for post in one.profile if post.category == "agreed_with"]
        assert agreed == [row["chosen"]["content"] for row in history]
        assert [post.text for post in one.profile if post.category == "disagreed_with"] == [
            row["rejected"]["content"] for row in history
        ]
    tested = {row["context"][0]["content"] for row in rows if row["split"] == "test"}
    assert {one.question for one in comparisons} == tested
    trained = read_comparisons(source, split="train")
    assert [len(one.profile) for one in trained] == [0] * 4 + [3] * 4
    assert len(read_comparisons(source, split="validation")) == 8
    with pytest.raises(DataError, match="no split 'other' in the column 'split': found test, train, val"):
        read_comparisons(source, split="other")


def test_a_file_whose_form_tells_the_label_is_refused(tmp_path):
    # A published run wrote chosen responses as text and rejected ones as lists of messages.
    rows = personalrewardbench_rows()
    for row in rows:
        row["rejected"]["content"] = str([{"role": "assistant", "content": row["rejected"]["content"]}])
    with pytest.raises(DataError, match=r"1: field 'rejected.content': a list of messages printed as text"):
        read(PRB_PRISM, rows, tmp_path / "a")
    utterances, survey = prism_rows(people=60, each=2)
    for form, refused in (("{}", False), ("['{}']", True)):
        rows = [
            row if row["if_chosen"] else row | {"model_response": form.format(row["model_response"])}
            for row in utterances
        ]
        folder = tmp_path / str(refused)
        folder.mkdir()
        write_lines(folder / "utterances.jsonl", rows)
        write_lines(folder / "survey.jsonl", survey)
        comparisons = Held(read_comparisons(f"prism:{folder}"))
        population = read_population(comparisons, blank_features(comparisons))
        (split,) = make_splits(population, by="user", seeds=1)
        if refused:
            with pytest.raises(
                RunError, match=r"the wrapping of the responses tells the labels: a .*bracket at the"
            ):
                check_wrappers(population, split)
        else:
            assert check_wrappers(population, split)["wrapper_accuracy"] == 0.5


def test_multipref_has_a_comparison_for_each_annotator(tmp_path):
    rows = multipref_rows(people=4, each=8)
    with pytest.warns(PrbWarning, match="left out: ties: "):
        comparisons = read("multipref", rows, tmp_path)
    notes = [
        (row, f"{kind}-{note['evaluator']}", note["overall_pref"])
        for row in rows
        for kind in ("normal", "expert")
        for note in row[f"{kind}_worker_annotations"]
        if note["overall_pref"] != "Tie"
    ]
    assert len(notes) == len(comparisons) > 20
    for one, (row, user, level) in zip(comparisons, notes, strict=True):
        better, worse = ("a", "b") if level[0] == "A" else ("b", "a")
        assert one.responses == (row[f"completion_{better}"], row[f"completion_{worse}"])
        assert one.user_id == user
        assert one.subset == f"{user.partition('-')[0]}/{'clearly' if 'clearly' in level else 'slightly'}"
        assert one.category == "Open QA"


def test_evaluesteer_asks_everything_both_ways(tmp_path):
    for number, rows in enumerate((evaluesteer_rows(), evaluesteer_items())):
        comparisons = read("evaluesteer", rows, tmp_path / str(number))
        values = 2 * 2 * (16 if number else 17)  # with the CSV file's row without a style
        styles = 2 * 4 * 2 * 16
        by_kind = Counter(str(one.subset).partition("/")[0] for one in comparisons)
        assert by_kind == {"value": values, "style": styles}
        # A score of the text alone, without ties, is right in half of them.
        ranks = np.random.default_rng(0).permutation(8000)
        blind = []
        for one in comparisons:
            scores = [float(ranks[int(text.split()[0][1:])]) for text in one.responses]
            blind.append(ScoredRow(one.id, one.subset, one.user_id, scores, one.labels or ()))
        assert people.score(blind).score == 0.5
        one = next(c for c in comparisons if c.subset == "style/verbosity" and "concise" in str(c.user_id))
        assert FAMILIES["verbosity"]["concise"] in [post.text for post in one.profile]
        assert len({c.user_id for c in comparisons if str(c.subset).startswith("style")}) == 16
    failed = evaluesteer_items()
    failed[0]["completion_A_warm"] = "Error: Could not extract"
    with pytest.warns(PrbWarning, match="pairs with an empty response, or of equal ones: 20"):
        read("evaluesteer", failed, tmp_path / "failed")


def test_alignx_targets_know_the_earlier_pairs(tmp_path):
    rows = alignx_rows()
    comparisons = read("alignx", rows, tmp_path)
    assert Counter(one.subset for one in comparisons) == {"feedback": 16, "target": 4}
    first, target = comparisons[0], comparisons[4]
    assert [post.category for post in first.profile] == ["about this person", "comment", "comment"]
    agreed = [post.text for post in target.profile if post.category == "agreed_with"]
    assert agreed == [pair["chosen"] for pair in rows[0]["Pair-wise Comparative Feedback"]]
    assert target.profile[1].text == "On the post: A post\n\nComment: Comment 0 of 0"
    assert "0.5" not in json.dumps(target.to_row())  # no preference direction
    scored = [
        ScoredRow(c.id, c.subset, c.user_id, [1.0, 2.0 * (c.subset == "feedback")], [1.0, 0.0])
        for c in comparisons
    ]
    result = get_benchmark("alignx").score(scored)
    assert (result.score, result.figures["feedback"], result.details["comparisons"]) == (1.0, 0.0, 20)


def test_personalllm_people_are_mixtures(tmp_path):
    rows = personalllm_rows(personalllm.PEOPLE + 3)
    comparisons = read("personalllm", rows, tmp_path)
    weights = personalllm.tastes()
    assert weights.shape == (100, 10)
    assert weights.sum(1) == pytest.approx(np.ones(100))
    for place in (0, 5, 102):
        one, row = comparisons[place], rows[place]
        assert one.user_id == f"simulated-{place % 100}"
        expected = [
            sum(
                weight * row[f"response_{number}_{model}"] / spread
                for weight, (model, spread) in zip(
                    weights[place % 100], personalllm.SPREADS.items(), strict=True
                )
            )
            for number in range(1, 9)
        ]
        assert one.labels == pytest.approx(expected)
    assert [post.category for post in comparisons[102].profile] == ["asked", "agreed_with"]
    assert comparisons[102].profile[1].text == comparisons[2].responses[int(np.argmax(comparisons[2].labels))]


# Rules.


def test_the_rule_of_people_as_counted_by_hand():
    rows = [
        ScoredRow("a@1", "en/balanced", "u", [3, 1, 2], [1, 0, 0]),
        ScoredRow("b@1", "en/other", "u", [1, 1, 2], [1, 0, 0]),
        ScoredRow("c@2", "fr/balanced", "v", [1, 5, 2], [7, 50, 50]),
        ScoredRow("d@3", None, None, [1, 1], [0, 1]),
    ]
    result = get_benchmark(CA).score(rows)
    assert result.score == 2 / 4
    assert result.figures == {
        "mean over prompts": pytest.approx((1 / 2 + 1 + 0) / 3),
        "pairs": (2 + 0 + 2 + 0) / (2 + 2 + 2 + 1),
        "mean over users": pytest.approx((1 / 2 + 1 + 0) / 3),
        "balanced": 1.0,
        "en": 0.5,
        "fr": 1.0,
        "other": 0.0,
    }
    assert result.details["by_part"] == {"balanced": 2, "en": 2, "fr": 1, "other": 1}


def test_rmgap_on_random_scores_as_the_reference_counts_them(tmp_path):
    comparisons = read("rmgap", rmgap_rows(6), tmp_path)
    rng = np.random.default_rng(0)
    rows = [ScoredRow(c.id, c.subset, None, coarse(rng, 4), c.labels or ()) for c in comparisons]
    rows[:12] = [ScoredRow(r.id, r.subset, None, [4.0, 3.0, 1.0, 1.0], r.labels) for r in rows[:12]]
    result = rmgap.score(rows)
    means = {"best of 4": [], "pair": [], "consistency": []}
    for domain in rmgap.DOMAINS:
        members = [row for row in rows if row.subset == domain]
        right = [row.scores[list(row.labels).index(1.0)] for row in members]
        others = [[s for s, label in zip(r.scores, r.labels) if label == 0] for r in members]
        best = np.mean([score > max(rest) for score, rest in zip(right, others)])
        pair = np.mean([[score > one for one in rest] for score, rest in zip(right, others)])
        orders = [tuple(np.argsort(-np.array(row.scores), kind="stable")) for row in members]
        consistent = np.mean([len(set(orders[i : i + 3])) == 1 for i in range(0, len(orders), 3)])
        found = result.details["domains"][domain]
        assert [found["best of 4"], found["pair"], found["consistency"]] == pytest.approx(
            [best, pair, consistent]
        )
        for name, value in zip(means, (best, pair, consistent), strict=True):
            means[name].append(value)
    assert {name: result.figures[name] for name in means} == pytest.approx(
        {n: np.mean(v) for n, v in means.items()}
    )
    assert result.score == result.figures["best of 4"]
    assert 0 < result.figures["consistency"] < 1
    some = rmgap.score([row for row in rows if row.subset != "Safety"])
    assert (some.score, some.missing) == (None, ["Safety"])
    drawn = score_intervals(rmgap.BENCHMARK, rows, Clusters((None,) * len(rows)), seed=0, resamples=50)
    assert drawn["score_ci95"][0] < result.score < drawn["score_ci95"][1]
    with pytest.raises(DataError, match="row 'x': expected 4 responses, one of them right"):
        rmgap.score([ScoredRow("x", "Chat", None, [1.0, 0.0], [1.0, 0.0])])


def test_people_in_several_subsets_are_drawn_whole():
    # Each person wins all or nothing, in two subsets: drawing each subset by itself would halve the variance.
    rows = [
        ScoredRow(f"{user}-{subset}", subset, f"{user}", [float(user % 2), 0.5], [1.0, 0.0])
        for user in range(40)
        for subset in ("a", "b")
    ]
    users = Clusters(tuple(row.user_id for row in rows))
    low, high = score_intervals(get_benchmark(PRISM), rows, users, seed=0, resamples=800)["score_ci95"]
    assert (high - low) / 2 == pytest.approx(1.96 * (0.25 / 40) ** 0.5, rel=0.1)


def test_crossed_people_have_the_interval_of_the_accuracy(tmp_path):
    rows = multipref_rows(people=12, each=12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrbWarning)
        result = prb.evaluate("baseline:length", write_published("multipref", rows, tmp_path), progress=False)
    benchmark = result.summary["benchmarks"]["multipref"]
    assert benchmark["score"] == result.summary["accuracy"]
    assert benchmark["score_ci95"] == result.summary["ci95"] is not None
    assert benchmark["score_ci95_reason"] is None
    assert set(benchmark["figures_ci95"].values()) == {None}


def test_a_plugin_that_fails_while_it_reads_is_named(tmp_path, monkeypatch):
    def records(published):
        for place, row in published.rows:
            yield place.where, {"id": row["name"], "question": "?", "chosen": "a", "rejected": "b"}

    mine = Benchmark(
        name="mine", rule="any", score=people.score, home="x", columns=("name",), records=records
    )
    monkeypatch.setattr(plugins, "_registered", {})
    plugins.register_plugin("benchmarks", "mine", mine)
    path = write_lines(tmp_path / "x.jsonl", [{"name": "1"}, {"title": "2"}])
    first = next(iter(each_comparison(f"mine:{path}")))
    assert first.responses == ("a", "b")
    with pytest.raises(RunError, match=r"registered, of module .*: fails: KeyError: 'name'"):
        read_comparisons(f"mine:{path}")


def test_a_prepared_data_set_keeps_its_rule(tmp_path):
    source = f"prism:{WRITERS['prism'](tmp_path / 'data')}"
    prepare([source], out=tmp_path / "prepared")
    assert read_comparisons(tmp_path / "prepared") == read_comparisons(source)
    assert benchmark_of(tmp_path / "prepared") == "prism"
