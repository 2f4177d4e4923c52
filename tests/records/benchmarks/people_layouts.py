"""Data sets of people written to disk in their public layouts, with invented texts and planted tastes.

A response "r12 ..." has the twelfth row of a table of features; a person prefers the response with the highest product
of its features and the person's taste.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from prb_jax.records.benchmarks.evaluesteer import FAMILIES
from prb_jax.records.benchmarks.personalllm import SPREADS
from tests.json_lines import write_lines

from .layouts import write_hub

WIDTH = 6
TABLE = np.random.default_rng(0).standard_normal((8000, WIDTH)).astype(np.float32)

Rows = list[dict[str, Any]]


def features_of(text: str) -> np.ndarray:
    """The features of a response, float32 [WIDTH]; zeros for any other text."""
    found = re.match(r"r(\d+) ", text)
    return TABLE[int(found[1])] if found else np.zeros(WIDTH, np.float32)


def worded(row: int) -> str:
    """The response with these features."""
    return f"r{row} answer{' more' * (row % 5)}."


@cache
def taste(person: str) -> np.ndarray:
    """What a person likes beside what all do, float64 [WIDTH]; of the empty name, what all like."""
    return np.random.default_rng(crc32(person.encode())).standard_normal(WIDTH)


class World:
    """Draws responses, each once, and knows what people like."""

    def __init__(self, seed: int = 1) -> None:
        self.rows = iter(np.random.default_rng(seed).permutation(len(TABLE)).tolist())

    def texts(self, count: int) -> list[str]:
        """Distinct responses of different lengths."""
        return [worded(row) for row in itertools.islice(self.rows, count)]

    def worth(self, person: str, text: str) -> float:
        """How much a person likes a response."""
        return float(features_of(text) @ (taste("") + 3 * taste(person)))

    def best(self, person: str, texts: Sequence[str]) -> int:
        """The place of the response that a person prefers."""
        return int(np.argmax([self.worth(person, text) for text in texts]))


def community_alignment_rows(people: int = 4, each: int = 3) -> Rows:
    world, rows = World(), []
    for number in range(people * each):
        person = f"a{number % people}"
        row: dict[str, Any] = {
            "conversation_id": f"c{number}",
            "annotator_id": person,
            "annotator_age": "18-34",
            "annotator_gender": "female" if number % people % 2 else "male",
            "annotator_education_level": "Other",
            "annotator_political": "EMPTY STRING",
            "annotator_ethnicity": None,
            "annotator_country": "india" if number % people % 2 else "italy",
            "assigned_lang": "en" if number % people % 2 else "it",
            "wave": 1,
            "is_pregenerated_first_prompt": True,
            "in_balanced_subset": number % people < 2,
            "in_balanced_subset_10": False,
        }
        for turn in ("first", "second", "third", "fourth"):
            row |= {f"{turn}_turn_{name}": None for name in ("prompt", "preferred_response", "feedback")}
            row |= {f"{turn}_turn_response_{letter}": None for letter in "abcd"}
        for order, turn in enumerate(("first", "second")[: 1 + number % 2]):
            texts = world.texts(4)
            row[f"{turn}_turn_prompt"] = f"Question {number // people} of turn {order}?"
            row |= {
                f"{turn}_turn_response_{letter}": text + "<|end_of_text|>"
                for letter, text in zip("abcd", texts)
            }
            row[f"{turn}_turn_preferred_response"] = f"response_{'abcd'[world.best(person, texts)]}"
            row[f"{turn}_turn_feedback"] = f"I like it for reason {number}." if order else ""
        rows.append(row)
    return rows


def write_community_alignment(folder: Path, **sizes: int) -> Path:
    return write_hub(folder, {"filtered": community_alignment_rows(**sizes)})


def prism_rows(people: int = 4, each: int = 2) -> tuple[Rows, Rows]:
    """Utterances and the survey."""
    world, utterances = World(), Rows()
    for number in range(people * each):
        person, turns = f"user{number % people}", 1 + number % 2
        for turn in range(turns):
            texts = world.texts(2 if turn else 4)
            worths = [world.worth(person, text) for text in texts]
            order = np.argsort(np.argsort(worths))
            for place, text in enumerate(texts):
                utterances.append(
                    {
                        "utterance_id": f"ut{len(utterances)}",
                        "interaction_id": f"int{number}-{turn}",
                        "conversation_id": f"c{number}",
                        "user_id": person,
                        "turn": turn,
                        "within_turn_id": place,
                        "conversation_type": ("unguided", "values guided", "controversy guided")[number % 3],
                        "user_prompt": f"Prompt {number} of turn {turn}",
                        "model_response": text,
                        "model_name": f"model{place}",
                        "model_provider": "nobody",
                        "score": int(20 * order[place] + 7),
                        "if_chosen": place == int(np.argmax(worths)),
                    }
                )
    survey = [
        {
            "user_id": f"user{number}",
            "self_description": f"I am person {number}.",
            "system_string": "Be brief.",
            "age": "25-34 years old",
            "gender": "Male",
            "education": "EMPTY STRING",
        }
        for number in range(people)
    ]
    return utterances, survey


def write_prism(folder: Path, **sizes: int) -> Path:
    folder.mkdir(parents=True)
    for name, rows in zip(("utterances", "survey"), prism_rows(**sizes), strict=True):
        write_lines(folder / f"{name}.jsonl", rows)
    write_lines(folder / "metadata.jsonl", [{"column_id": "x", "text_id": "ut0"}])
    return folder


def personalrewardbench_rows(people: int = 4, each: int = 6) -> Rows:
    world, rows = World(), []
    for number in range(people * each):
        person, texts = f"user{number % people}", world.texts(2)
        best = world.best(person, texts)
        rows.append(
            {
                "user_id": person,
                "split": ("test", "train", "val")[number // people % 3],
                "context": [{"role": "user", "content": f"Question {number}?"}],
                "chosen": {"role": "assistant", "content": texts[best]},
                "rejected": {"role": "assistant", "content": texts[1 - best]},
                "chosen_score": 0.9,
                "agreement": 0.4,
            }
        )
    return rows


def write_personalrewardbench(folder: Path, **sizes: int) -> Path:
    rows = personalrewardbench_rows(**sizes)
    return write_hub(folder, {"train": rows[::2], "test": rows[1::2]})


def rmgap_rows(each: int = 2) -> Rows:
    world, rows = World(), []
    for number in range(4 * each):
        texts = world.texts(4)
        rows.append(
            {
                "id": f"i{number}",
                "domain": ("Chat", "Writing", "Reasoning", "Safety")[number % 4],
                "source": "nowhere",
                "responses": [{"key": key, "text": text} for key, text in zip("DBCA", texts)],
                "prompt_groups": [
                    {
                        "winner": key,
                        "prompts": [{"text": f"Ask {order} for {key} of {number}"} for order in range(3)],
                    }
                    for key in "ABCD"
                ],
                "style_assignments": {},
            }
        )
    return rows


def write_rmgap(folder: Path, **sizes: int) -> Path:
    folder.mkdir(parents=True)
    write_lines(folder / "test.jsonl", rmgap_rows(**sizes))
    return folder


def multipref_rows(people: int = 4, each: int = 4) -> Rows:
    world, rows = World(), []
    for number in range(people * each // 4):
        a, b = texts = world.texts(2)

        def judged(kind: str, number: int = number, texts: Sequence[str] = texts) -> Rows:
            notes = []
            for place in (2 * number, 2 * number + 1):
                better = "AB"[world.best(f"{kind}-{place % people}", texts)]
                level = f"{better}-is-{('clearly', 'slightly')[place % 2]}-better"
                level = "Tie" if (number + place) % 7 == 6 else level
                notes.append({"evaluator": f"{place % people}", "overall_pref": level, "helpful_pref": "Tie"})
            return notes

        rows.append(
            {
                "comparison_id": f"m{number}",
                "prompt_id": f"p{number}",
                "text": f"Question {number}?",
                "category": "Open QA",
                "completion_a": a,
                "completion_b": b,
                "normal_worker_annotations": judged("normal"),
                "expert_worker_annotations": judged("expert"),
            }
        )
    return rows


def write_multipref(folder: Path, **sizes: int) -> Path:
    return write_hub(folder, {"train": multipref_rows(**sizes)})


def evaluesteer_rows(questions: int = 2) -> Rows:
    """The features of the two styles of a family lie apart in one direction."""
    rows = []
    for number in range(questions):
        for direction, styles in enumerate(({"none": ""}, *FAMILIES.values())):
            names = [*styles, *styles][:2]
            order = np.argsort(TABLE[:, direction])
            start = 10 * number + 2 * direction
            texts = [worded(int(row)) for row in order[[start, start + 1, -start - 1, -start - 2]]]
            rows.append(
                {
                    "question_id": f"Q{number}",
                    "prompt": f"What do you think of {number}?",
                    "wvs_question": "How important is it?",
                    "value_statement_1": f"{number} is important",
                    "value_statement_2": f"{number} is not important",
                    "style_1": names[0],
                    "style_2": names[1],
                    "value1_style1_completion": texts[0],
                    "value2_style1_completion": texts[1],
                    "value1_style2_completion": texts[2] if len(styles) > 1 else "",
                    "value2_style2_completion": texts[3] if len(styles) > 1 else "",
                }
            )
    return rows


def evaluesteer_items(questions: int = 2) -> Rows:
    """The same data as the JSON file has them, an object for each question."""
    world, items = World(), []
    for number in range(questions):
        item = {
            "question_id": f"Q{number}",
            "prompt": f"What of {number}?",
            "wvs_question": "?",
            "wvs_response": 1,
        }
        item |= {"statement_1": f"{number} is good", "statement_2": f"{number} is bad"}
        for letter in "AB":
            item[f"completion_{letter}"] = world.texts(1)[0]
            for styles in FAMILIES.values():
                item |= {f"completion_{letter}_{style}": text for style, text in zip(styles, world.texts(2))}
        items.append(item)
    return items


def write_evaluesteer(folder: Path, **sizes: int) -> Path:
    rows = evaluesteer_rows(**sizes)
    folder.mkdir(parents=True)
    with (folder / "evaluesteer.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return folder


def alignx_rows(people: int = 4) -> Rows:
    world, rows = World(), []

    def pair(person: str, question: str) -> dict[str, Any]:
        texts = world.texts(2)
        best = world.best(person, texts)
        return {
            "prompt": question, "chosen": texts[best], "rejected": texts[1 - best], "Preference Direction": [0.5] * 90,
        }  # fmt: skip

    for number in range(people):
        person = f"{number}"
        rows.append(
            pair(person, f"Post {number}")
            | {
                "Demographic Information": f"Person {number} lives in a town.",
                "User-Generated Content": [
                    {
                        "prompt": "A post",
                        "comment": f"Comment {i} of {number}",
                        "Preference Direction": [0.5] * 90,
                    }
                    for i in range(2)
                ],
                "Pair-wise Comparative Feedback": [
                    pair(person, f"Older post {number}-{i}") for i in range(4)
                ],
            }
        )
    return rows


def write_alignx(folder: Path, **sizes: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "train.json").write_text(json.dumps(alignx_rows(**sizes), indent=1))
    return folder


def personalllm_rows(count: int = 6) -> Rows:
    world, rows = World(), []
    for number in range(count):
        texts = world.texts(8)
        row: dict[str, Any] = {"prompt": f"Question {number}?", "subset": "x"}
        for place, text in enumerate(texts, start=1):
            row[f"response_{place}"] = text
            row |= {
                f"response_{place}_{model}": round(float(world.worth(model, text)), 4) for model in SPREADS
            }
        rows.append(row)
    return rows


def write_personalllm(folder: Path, **sizes: int) -> Path:
    return write_hub(folder, {"train": personalllm_rows(3), "test": personalllm_rows(**sizes)})


WRITERS: dict[str, Callable[..., Path]] = {
    "community-alignment": write_community_alignment,
    "prism": write_prism,
    "personalrewardbench-prism": write_personalrewardbench,
    "personalrewardbench-arena": write_personalrewardbench,
    "rmgap": write_rmgap,
    "multipref": write_multipref,
    "evaluesteer": write_evaluesteer,
    "alignx": write_alignx,
    "personalllm": write_personalllm,
}
"""Writes each data set into a folder."""


STUDIES: dict[str, dict[str, int]] = {
    "community-alignment": {"people": 40, "each": 6},
    "prism": {"people": 40, "each": 6},
    "personalrewardbench-prism": {"people": 40, "each": 24},
    "personalrewardbench-arena": {"people": 40, "each": 24},
    "multipref": {"people": 40, "each": 20},
    "evaluesteer": {"questions": 20},
    "alignx": {"people": 60},
    "personalllm": {"count": 400},
}
"""Sizes with which a study has enough people."""
