"""The best of all responses in one question, and ratings of the subset Ties, by the rule of RewardBench 2."""

import json
import re
from typing import Any

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.judges.judge import open_judge
from prb_jax.behaviour.judges.ranking import read_letter
from prb_jax.metrics.rows import ScoredRow
from prb_jax.records.benchmarks.rewardbench2 import ties_score
from tests.behaviour.judges.stand_in import judged, shown_answer, stand_in
from tests.json_lines import read_lines

SUBSETS = ("Factuality", "Precise IF", "Math", "Safety", "Focus")


def rows() -> list[dict[str, Any]]:
    """Best of four in five subsets, and both kinds of Ties; a right answer says how right it is."""
    four = [
        {
            "id": str(number), "subset": subset, "prompt": f"Prompt {number}?", "chosen": ["worth 9"],
            "rejected": ["worth 1", "worth 2", "worth 3"], "num_correct": 1,
        }
        for number, subset in enumerate(SUBSETS * 2)
    ]  # fmt: skip
    ties = [
        {"id": "ref:0", "chosen": ["worth 8"], "rejected": ["worth 2", "mute"], "num_correct": 1},
        {"id": "tied:0", "chosen": ["worth 7", "worth 8"], "rejected": ["worth 3"], "num_correct": 2},
    ]
    return four + [{**row, "subset": "Ties", "prompt": "Any colour?"} for row in ties]


def letter_of(text: str, worth: int) -> str:
    answers = dict(re.findall(r"Answer ([A-D]):\nworth (\d)", text))
    return next(letter for letter, number in answers.items() if int(number) == worth)


def test_rewardbench2_is_ranked_and_its_ties_are_rated(tmp_path):
    """A judge that is right but for one prompt that it gets wrong and one on which it is silent."""
    data = tmp_path / "rb2.json"
    data.write_text(json.dumps(rows()))

    def reply(text: str, _: int) -> str:
        if "Any colour?" in text:
            return shown_answer(text).removeprefix("worth ")
        if "Prompt 5?" in text:
            return "Verdict: " + letter_of(text, 1)
        return "None of them." if "Prompt 6?" in text else letter_of(text, 9)

    with stand_in(reply) as server:
        command = ["judge", "--endpoint", server.url, "--model", "m", "--data", f"rewardbench2:{data}"]
        out = tmp_path / "run"
        assert cli.main([*command, "--out", str(out), "--protocol", "ranking", "--no-progress"]) == 0
        assert len(server.asked) == 10 + 5  # "worth 8" is asked about once
        backwards = judged(
            server, prb.read_comparisons(f"rewardbench2:{data}")[::-1], tmp_path / "b", protocol="ranking"
        )
    summary = json.loads((out / "summary.json").read_text())
    figures = summary["benchmarks"]["rewardbench2"]["figures"]
    assert [figures[name] for name in SUBSETS] == [0.5, 0.625, 1.0, 1.0, 1.0]
    ties = [
        ScoredRow(id=name, scores=scores, labels=labels, user_id=None, subset="Ties")
        for name, scores, labels in (
            ("ref:0", [8.0, 2.0, -1.0], [1.0, 0.0, 0.0]), ("tied:0", [7.0, 8.0, 3.0], [1.0, 1.0, 0.0])
        )
    ]  # fmt: skip
    assert figures["Ties"] == pytest.approx(ties_score(ties).score)
    judge = summary["judge"]
    assert (judge["ranked"], judge["rated"], judge["unparsable"], judge["unparsable_ratings"]) == (
        10,
        2,
        1,
        1,
    )
    assert sum(judge["said"].values()) == 9
    assert len(judge["said"]) > 2  # the right answer stands under several letters
    kept = {row["id"]: row for row in read_lines(out / "judgements.jsonl")}
    others = {row["id"]: row for row in read_lines(backwards.out / "judgements.jsonl")}
    assert all(kept[name].get("order") == others[name].get("order") for name in kept)


def test_votes_are_shares(tmp_path):
    data = [
        prb.Comparison(id="1", question="?", responses=["worth 9", "worth 1", "worth 2"], labels=[2, 0, 1])
    ]

    def reply(body: Any, _: int) -> str:
        text = body["messages"][-1]["content"]
        return "Verdict: " + letter_of(text, (9, 9, 1)[body["seed"] % 3])

    with stand_in(reply, whole=True) as server:
        run = judged(server, data, tmp_path, protocol="ranking", reason=True, temperature=1.0, votes=3)
    assert run.rows[0].scores == pytest.approx((2 / 3, 1 / 3, 0.0))


def test_what_is_read_of_a_reply():
    expected = {
        "C": "C", "**b**.": "B", "Verdict: D": "D", "I think [[A]].\nVerdict: [[B]]": "B", "<think>A</think>C": "C",
        "Verdict: A\nVerdict: C": "C", "Verdict: A or B": None, "Verdict: E": None, "A and B": None, "": None,
        "<think>Verdict: A": None, "[[A]] [[B]]": None, "Verdict: not A": None,
    }  # fmt: skip
    assert {reply: read_letter(reply, "ABCD") for reply in expected} == expected


def test_a_model_here_needs_words():
    with pytest.raises(prb.RunError, match="names the best response in words: add --reason"):
        open_judge("none", prb.JudgeOptions(protocol="ranking"), cache=None)
