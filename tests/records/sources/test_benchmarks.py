"""Published layouts on disk, read by name."""

import gzip
import json
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import datasets
import numpy as np
import pytest

import prb_jax as prb
from prb_jax import seams
from prb_jax.errors import DataError
from prb_jax.records import benchmarks
from prb_jax.records.benchmarks import rm_bench
from prb_jax.records.intake import benchmark_of, describe_source, read_comparisons
from tests.json_lines import write_lines
from tests.records.benchmarks.layouts import (
    rewardbench2_rows,
    scored,
    write_hub,
    write_judgebench,
    write_llmbar,
    write_prefeval,
    write_rewardbench,
    write_rm_bench,
)

PAIR = {"id": 1, "prompt": "q", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize("name", benchmarks.NAMES)
def test_every_benchmark_has_its_file(name):
    benchmark = benchmarks.get_benchmark(name)
    assert benchmark.name == name
    assert benchmark.rule
    assert benchmark.repository or benchmark.home
    if benchmark.repository:
        assert benchmarks.of_repository(benchmark.repository) is benchmark
        assert benchmark_of(name) == benchmark_of(benchmark.repository) == name
        assert describe_source(name)["repository"] == benchmark.repository
    with pytest.raises(KeyError, match="no benchmark 'other'"):
        benchmarks.get_benchmark("other")


def test_rewardbench(tmp_path):
    folder = write_rewardbench(tmp_path / "rb")
    comparisons = read_comparisons(f"rewardbench:{folder}")
    assert len(comparisons) == 46  # the split "filtered" alone
    first = comparisons[0]
    assert (first.id, first.subset) == ("0", "alpacaeval-easy")
    assert first.responses == ("a good answer", "a bad answer")
    assert benchmark_of(f"rewardbench:{folder}") == "rewardbench"
    assert benchmark_of(folder) is None
    assert [c.id for c in read_comparisons(f"rewardbench:{folder}", subset="hep-go")] == ["36", "37"]
    with pytest.raises(DataError, match="no subset 'Chat'; expected one of alpacaeval-easy, "):
        read_comparisons(f"rewardbench:{folder}", subset="Chat")


def test_from_the_hub_by_name(tmp_path, monkeypatch, hub_of):
    asked = hub_of(write_rewardbench(tmp_path / "rb"))
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda path: ["default"])
    for source in ("rewardbench", "allenai/reward-bench"):
        assert len(read_comparisons(source, limit=5)) == 5
    assert asked == [("allenai/reward-bench", "default", "filtered")] * 2


def test_a_file_of_own_records_or_of_published_ones(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [PAIR | {"subset": "math-prm"}])
    assert read_comparisons(f"rewardbench:{path}")[0].subset == "math-prm"
    described = describe_source(f"rewardbench:{path}")
    assert described["benchmark"] == "rewardbench"
    assert described["files"] == describe_source(path)["files"]
    two = tmp_path / "two.json"
    two.write_text(json.dumps(rewardbench2_rows()))
    assert len(read_comparisons(f"rewardbench2:{two}")) == 7


def test_ids_that_subsets_share_are_told_apart(tmp_path):
    rows = [
        PAIR | {"prompt": prompt, "subset": f"hep-{language}"}
        for prompt, language in zip("qrs", ("go", "js", "go"))
    ]
    path = write_lines(tmp_path / "x.jsonl", rows)
    assert [c.id for c in read_comparisons(f"rewardbench:{path}")] == ["hep-go/1", "hep-js/1", "hep-go/1#2"]


def test_rewardbench2(tmp_path):
    folder = write_hub(tmp_path / "rb2", {"test": rewardbench2_rows()})
    comparisons = read_comparisons(f"rewardbench2:{folder}")
    assert [len(c.responses) for c in comparisons] == [4] * 5 + [3, 6]
    assert comparisons[0].responses[0] == "the right one"
    assert comparisons[-1].id == "tied:0"
    assert comparisons[-1].labels == (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)


def test_rm_bench(tmp_path):
    folder = write_rm_bench(tmp_path / "rm")
    comparisons = read_comparisons(f"rm-bench:{folder}")
    assert len(comparisons) == 15
    assert comparisons[1].responses[:3] == ("yesyes", "well, yes", "**yes**, indeed")
    assert comparisons[1].responses[3:] == ("no", "well, no", "**no**, never at all")
    assert comparisons[-1].subset == "safety-response"
    assert comparisons[0].labels == (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    assert read_comparisons(f"rm-bench:{folder / 'total_dataset.json'}") == comparisons


def test_judgebench(tmp_path):
    folder = write_judgebench(tmp_path / "jb")
    comparisons = read_comparisons(f"judgebench:{folder}")
    assert [c.subset for c in comparisons] == [
        f"{writer}/{category}"
        for writer in ("gpt", "claude")
        for category in ("knowledge", "knowledge", "reasoning", "math", "coding")
    ]
    assert comparisons[0].labels == (0.0, 1.0)
    assert comparisons[1].labels == (1.0, 0.0)
    assert comparisons[1].responses == ("answer Aanswer A", "answer B")
    of_gpt = read_comparisons(f"judgebench:{folder}/data/gpt-00000-of-00001.jsonl")
    assert of_gpt == comparisons[:5]


def test_llmbar(tmp_path):
    folder = write_llmbar(tmp_path / "Dataset")
    comparisons = read_comparisons(f"llmbar:{folder}")
    assert {c.subset for c in comparisons} == {
        "LLMBar/Natural", "LLMBar/Adversarial/Neighbor", "LLMBar/Adversarial/GPTInst",
        "LLMBar/Adversarial/GPTOut", "LLMBar/Adversarial/Manual", "CaseStudy/Negation",
    }  # fmt: skip
    natural = read_comparisons(f"llmbar:{folder}", subset="LLMBar/Natural")
    assert [(c.id, c.labels) for c in natural] == [
        ("LLMBar/Natural-0", (1.0, 0.0)),
        ("LLMBar/Natural-1", (0.0, 1.0)),
    ]
    assert read_comparisons(f"llmbar:{folder / 'LLMBar' / 'Natural' / 'dataset.json'}") == natural


def test_prefeval(tmp_path):
    folder = write_prefeval(tmp_path / "mcq_options")
    comparisons = read_comparisons(f"prefeval:{folder}")
    assert [c.id for c in comparisons] == [
        f"{t}-{i}" for t in ("pet_ownership", "travel_hotel") for i in range(3)
    ]
    first = comparisons[0]
    assert first.labels == (1.0, 0.0, 0.0, 0.0)
    assert first.responses[0] == "fits 0"
    assert [post.text for post in first.profile] == ["I dislike thing 0."]
    assert read_comparisons(f"prefeval:{folder / 'travel_hotel.json'}") == comparisons[3:]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("llmbar", "llmbar: has no data set on the hub; give --data llmbar:FOLDER with the folder Dataset"),
        ("prefeval", "give --data prefeval:FOLDER with the folder benchmark_dataset/mcq_options"),
        ("rewardbench:{tmp}/none", "none: no such file, folder or data set"),
        ("llmbar:{tmp}", r"no files \*\*/dataset.json in it; expected the folder Dataset"),
        ("rm-bench:{tmp}/pairs.json", "pairs.json:1: field 'chosen': expected a list, found 'a'"),
        ("rm-bench:{tmp}/two.json", "two.json:1: field 'chosen': expected 3 styles"),
        ("rewardbench2:{tmp}/two.json", "two.json:1: field 'num_correct': expected the number of chosen"),
        ("rewardbench:{tmp}/list.json", r"list.json:1: expected an object with fields, found \[1\]"),
        ("judgebench:{tmp}/judge.json", "judge.json:1: field 'label': expected A>B or B>A, found 'A=B'"),
        ("nothing", "or a benchmark: prb, rewardbench, rewardbench2, rm-bench, judgebench, llmbar, prefeval"),
    ],
)
def test_what_cannot_be_read(tmp_path, source, message):
    two = PAIR | {"chosen": ["a", "b"], "rejected": ["c"], "num_correct": 1, "subset": "Ties"}
    answers = {"response_A": "a", "response_B": "b", "label": "A=B"}
    judge = {"pair_id": "1", "source": "s", "question": "q", **answers}
    for name, row in {"pairs": PAIR, "two": two, "list": [1], "judge": judge}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps([row]))
    with pytest.raises(DataError, match=message):
        read_comparisons(source.format(tmp=tmp_path))


def test_real_rm_bench(tmp_path, real):
    lines = gzip.decompress(real("generic/rm_bench").read_bytes()).splitlines()
    rows = [
        row | {"chosen": row["chosen_styles"], "rejected": row["rejected_styles"]}
        for row in map(json.loads, lines)
    ]
    (tmp_path / "total_dataset.json").write_text(json.dumps(rows))
    comparisons = read_comparisons(f"rm-bench:{tmp_path}")
    assert len(comparisons) == 798
    lengths = [[float(len(text)) for text in c.responses] for c in comparisons]
    scores = [scored(c.id, s, 3, subset=c.subset) for c, s in zip(comparisons, lengths)]
    result = rm_bench.score(scores)
    domains = result.details["domains"]
    assert {name: part["items"] for name, part in domains.items()} == {
        "chat": 129,
        "code": 228,
        "safety": 441,
    }
    style0 = np.mean([s[0] > s[3] for s in lengths])
    weighted = sum(part["items"] * part["matrix"][0][0] for part in domains.values()) / 798
    assert weighted == pytest.approx(style0)
    # richer styles are longer: what is easy for length is its opposite where it is hard
    present = result.details["mean_of_present"]
    assert present["easy"] > 0.75 > 0.25 > present["hard"]


def test_real_llmbar_and_prefeval(real):
    llmbar = read_comparisons(f"llmbar:{real('generic/llmbar')}")
    assert sum(str(c.subset).startswith("LLMBar/") for c in llmbar) == 419
    prefeval = read_comparisons(f"prefeval:{real('personalised/prefeval')}")
    assert len({c.subset for c in prefeval}) == 20


def test_the_docs_show_how_to_add_one(tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parents[3] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    start = page.index("    def record(row, place):")
    end = page.index("record=record, score=score)", start)
    code = textwrap.dedent(page[start : page.index("\n", end)])
    module = ModuleType("prb_jax.records.benchmarks.mine")
    exec("from prb_jax.records.benchmarks.benchmark import *", module.__dict__)
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(benchmarks, "NAMES", (*benchmarks.NAMES, "mine"))
    monkeypatch.setitem(seams.BUILTIN["benchmarks"], "mine", f"{module.__name__}:BENCHMARK")
    rows = [
        {"uid": f"{i}", "instruction": "q", "good": "a" * i, "bad": "bb", "task": f"t{i % 2}"}
        for i in range(1, 5)
    ]
    folder = write_hub(tmp_path / "mine", {"test": rows})
    result = prb.evaluate("baseline:length", f"mine:{folder}", out=tmp_path / "run", progress=False)
    mine = result.summary["benchmarks"]["mine"]
    assert (mine["score"], mine["figures"]) == (0.5, {"t1": 0.5, "t0": 0.5})
    assert describe_source("org/mine")["benchmark"] == "mine"
