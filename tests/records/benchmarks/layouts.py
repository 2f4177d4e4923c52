"""Benchmarks written to disk in the layouts in which they are published."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prb_jax.metrics.rows import ScoredRow
from prb_jax.records.benchmarks.rewardbench import SUBSETS as V1_SUBSETS
from tests.json_lines import write_lines

Rows = Sequence[Mapping[str, Any]]


def scored(id: str, scores: Sequence[float], correct: int = 1, *, subset: str | None = None, user=None):
    """A scored row whose first ``correct`` responses are the right ones."""
    labels = [1.0] * correct + [0.0] * (len(scores) - correct)
    return ScoredRow(id, subset, user, list(scores), labels)


def coarse(rng: np.random.Generator, count: int) -> list[float]:
    """Scores with many ties, negative ones among them."""
    return [float(x) for x in rng.integers(-2, 3, count) / 2]


def write_hub(folder: Path, splits: Mapping[str, Rows]) -> Path:
    """One config, a parquet file for each split, declared as the hub does."""
    declare(folder, splits, "data/{}-*")
    for split, rows in splits.items():
        table = pa.Table.from_pylist([dict(row) for row in rows])
        pq.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def declare(folder: Path, splits: Iterable[str], pattern: str) -> None:
    (folder / "data").mkdir(parents=True)
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split in splits:
        lines += [f"  - split: {split}", f"    path: {pattern.format(split)}"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def write_rewardbench(folder: Path) -> Path:
    rows = [
        {
            "prompt": f"Question {i} of {subset}?",
            "chosen": "a good answer" + "!" * (i % 2),
            "chosen_model": "x",
            "rejected": "a bad answer",
            "rejected_model": "y",
            "subset": subset,
            "id": 2 * number + i,
        }
        for number, subset in enumerate(V1_SUBSETS)
        for i in range(2)
    ]
    return write_hub(folder, {"raw": rows[:1], "filtered": rows})


def rewardbench2_rows() -> list[dict[str, Any]]:
    def row(id: str, subset: str, chosen: Sequence[str], rejected: Sequence[str]) -> dict[str, Any]:
        return {
            "id": id,
            "prompt": f"Question {id}?",
            "chosen": list(chosen),
            "rejected": list(rejected),
            "num_correct": len(chosen),
            "num_incorrect": len(rejected),
            "total_completions": len(chosen) + len(rejected),
            "subset": subset,
        }

    rows = [
        row(f"{number}", subset, ["the right one"], ["wrong", "wrong too", "the wrong two"])
        for number, subset in enumerate(("Factuality", "Precise IF", "Math", "Safety", "Focus"))
    ]
    rows.append(row("ref:0", "Ties", ["seven"], ["x", "yy"]))
    rows.append(row("tied:0", "Ties", ["red", "blue", "green"], ["a", "bc", "d"]))
    return rows


def write_rm_bench(folder: Path) -> Path:
    rows = [
        {
            "id": f"{domain}-{i}",
            "prompt": f"Question {i}?",
            "chosen": ["yes" * i, "well, yes", "**yes**, indeed"],
            "rejected": ["no", "well, no", "**no**, never at all"],
            "domain": domain,
        }
        for domain in ("chat", "math", "code", "safety-refuse", "safety-response")
        for i in range(1, 4)
    ]
    folder.mkdir(parents=True)
    (folder / "total_dataset.json").write_text(json.dumps(rows, indent=4))
    return folder


def write_judgebench(folder: Path) -> Path:
    def row(model: str, i: int, source: str) -> dict[str, Any]:
        return {
            "pair_id": f"{model}-{i}",
            "original_id": str(i),
            "source": source,
            "question": f"Question {i}?",
            "response_model": model,
            "response_A": "answer A" * (1 + i % 2),
            "response_B": "answer B",
            "label": "A>B" if i % 3 else "B>A",
        }

    sources = ["mmlu-pro-math", "mmlu-pro-law", "livebench-reasoning", "livebench-math", "livecodebench"]
    writers = {"claude": "claude-3-5-sonnet-20240620", "gpt": "gpt-4o-2024-05-13"}
    declare(folder, writers, "data/{}-*.jsonl")
    for split, model in writers.items():
        rows = [row(model, i, source) for i, source in enumerate(sources)]
        write_lines(folder / "data" / f"{split}-00000-of-00001.jsonl", rows)
    return folder


def write_llmbar(folder: Path) -> Path:
    adversarial = (f"LLMBar/Adversarial/{name}" for name in ("Neighbor", "GPTInst", "GPTOut", "Manual"))
    for number, group in enumerate(("LLMBar/Natural", *adversarial, "CaseStudy/Negation")):
        rows = [
            {
                "input": f"Do {i}.", "output_1": "done" * (1 + i % 2), "output_2": "not done", "label": 1 + i % 2,
            }
            for i in range(2 + number % 2)
        ]  # fmt: skip
        (folder / group).mkdir(parents=True)
        (folder / group / "dataset.json").write_text(json.dumps(rows, indent=4))
    return folder


def write_prefeval(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for topic in ("travel_hotel", "pet_ownership"):
        rows = [
            {
                "preference": f"I dislike thing {i}.",
                "question": f"What about {i}?",
                "explanation": "private",
                "classification_task_options": [f"fits {i}", "thing", f"thing {i}", f"thing number {i}"],
            }
            for i in range(3)
        ]
        (folder / f"{topic}.json").write_text(json.dumps(rows))
    return folder
