"""Judges by the true rubric, the paper's judges of single responses, and options that do not go together."""

import hashlib
import json
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.behaviour.judges import paper
from prb_jax.behaviour.judges.judge import open_judge
from prb_jax.behaviour.judges.options import JudgeOptions
from prb_jax.behaviour.judges.ratings import ONE_ASPECT
from prb_jax.errors import RunError
from prb_jax.text.view import View
from tests.behaviour.judges.stand_in import comparisons, judged, shown_answer, stand_in
from tests.json_lines import read_lines
from tests.tiny_policies import write_policy


def rated_pairs(count: int = 3, **fields: Any) -> list[prb.Comparison]:
    """Pairs of a rubric of two aspects: the better response names both."""
    reasons = {"tea": "likes it", "walks": ""}
    aspects = [{"aspect": name, "evidence": "-", "reason": reason} for name, reason in reasons.items()]
    return comparisons(count, ("tea, then walks", "tea {aspects}"), **{"rubric_aspects": aspects, **fields})


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> str:
    """A stand-in for the paper's checkout, whose texts are not the paper's."""
    folder, system, evaluation = tmp_path / "prompts", "Be fair.", "{question}|{answer}|{aspects}"
    folder.mkdir()
    (folder / "evaluation.txt").write_text(f"{evaluation}\n")
    (tmp_path / "BoN").mkdir()
    script = f'run([{{"role": "system", "content": "{system}"}}], "other")\n'
    (tmp_path / "BoN" / "score.py").write_text(script)
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in (system, evaluation)]
    monkeypatch.setattr(paper, "SYSTEM_DIGEST", digests[0])
    monkeypatch.setattr(paper, "RUBRIC_PROMPT", ("evaluation.txt", digests[1]))
    return str(folder)


def test_the_paper_s_judges_are_asked_as_their_scripts_ask(checkout, tmp_path):
    """What cannot be read counts as 0 and as 0.5; unlike there, a place within a text stays as it is."""
    with stand_in(lambda text, _: "[2, 1]" if "then" in text else "well") as server:
        run = judged(server, rated_pairs(), tmp_path / "rubric", protocol="paper-rubric", prompts=checkout)
        body = server.asked[0][1]
        assert (body["max_tokens"], body["temperature"]) == (32, 0.0)
        assert body["messages"][0] == {"role": "system", "content": "Be fair."}
        shown = {asked["messages"][1]["content"] for _, asked in server.asked}
        answers = ("tea, then walks 0", "tea {aspects} 0")
        assert {f"Question 0?|{answer}|tea, walks" for answer in answers} <= shown
    figures = run.summary["judge"]
    assert (figures["mean_rating"], figures["std"], figures["min"], figures["max"]) == (0.75, 0.75, 0.0, 1.5)
    assert (run.summary["accuracy"], figures["failed_parses"], figures["ratings"]) == (1.0, 3, 6)
    assert run.summary["hints"]["upper_bound"] == ["rubric"]

    template = tmp_path / "ask.txt"
    template.write_text("{question}/{profile}/{answer}")
    options = {"protocol": "paper-score", "prompts": checkout, "template": str(template)}
    with stand_in(lambda text, _: "Score: 7" if "then" in text else "0.25") as server:
        run = judged(server, rated_pairs(), tmp_path / "score", **options)
        body = server.asked[0][1]
        assert body["max_tokens"] == 10
        assert "/Post 1 (Category: ):\nI like walks./tea" in body["messages"][1]["content"]
    assert list(run.rows[0].scores) == [0.5, 0.25]
    assert run.summary["judge"]["failed_parses"] == 3


def test_a_rubric_judge_is_asked_for_each_aspect_without_the_profile(tmp_path):
    def reply(text: str, _: int) -> str:
        walks = "wants the following of an answer.\n\nwalks\n" in text
        if "Question 2?" in text and walks:
            return "perhaps"
        return "2" if ("walks" if walks else "tea") in shown_answer(text) else "0"

    system = tmp_path / "system.txt"
    system.write_text("Be strict.\n")
    with stand_in(reply) as server:
        run = judged(server, rated_pairs(), tmp_path / "run", protocol="rubric", system=str(system))
        assert len(server.asked) == 12
        bodies = [body for _, body in server.asked]
        assert all(body["messages"][0] == {"role": "system", "content": "Be strict."} for body in bodies)
        assert not any("I like walks" in json.dumps(body) for body in bodies)
        assert any("tea: likes it" in body["messages"][1]["content"] for body in bodies)
    rows = read_lines(tmp_path / "run" / "judgements.jsonl")
    assert (rows[0]["ratings"], rows[0]["numbers"]) == ([2, 1], [[2, 2], [2, 0]])
    assert rows[2]["ratings"] == [None, None]
    judge = run.summary["judge"]
    assert (run.summary["accuracy"], judge["unparsable"], judge["scale"]) == (2 / 3, 1, [0, 2])
    assert run.summary["hints"]["upper_bound"] == ["rubric"]


def test_a_rubric_judge_by_logits_is_the_mean_over_aspects(tmp_path):
    """Of what the judge of single numbers says where it is asked for each aspect in the same words."""
    folder, data, template = tmp_path / "policy", rated_pairs(2), tmp_path / "t.txt"
    write_policy(folder, "qwen3", num_hidden_layers=1)

    def rated(options: JudgeOptions, data: list[prb.Comparison] = data) -> np.ndarray:
        judge = open_judge(folder, options, cache=tmp_path)
        (batch,) = judge.stream(data, view=View(0))
        return np.asarray(batch.scores, np.float64)

    by_rubric, expected = rated(JudgeOptions(protocol="rubric")), np.zeros((2, 2))
    for aspect in ("tea: likes it", "walks"):
        template.write_text(ONE_ASPECT.replace("{aspect}", aspect))
        expected += rated(JudgeOptions(protocol="score", template=str(template), scale=(0, 2))) / 2
    np.testing.assert_allclose(by_rubric, expected, atol=1e-6)
    with pytest.raises(prb.DataError, match="'c0': has no rubric_aspects"):
        rated(JudgeOptions(protocol="rubric"), rated_pairs(1, rubric_aspects=[]))
    assert np.ptp(by_rubric) > 1e-4


def test_what_does_not_go_together_is_one_error(checkout, tmp_path):
    template = tmp_path / "t.txt"
    template.write_text("{question}{answer}")
    without_answer = tmp_path / "without.txt"
    without_answer.write_text("{prompt}")
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"protocol": "numbers"}, "expected one of default, paper, score"),
        ({"protocol": "score", "scale": (3, 1)}, "--scale: expected LOW below HIGH"),
        ({"protocol": "score", "scale": (1, 10), "top_logprobs": 5}, "numbers of one digit"),
        ({"protocol": "score", "template": str(without_answer)}, r"without.txt: expected a place \{answer\}"),
        ({"protocol": "score", "template": str(tmp_path / "none")}, "none: cannot be read"),
        ({"protocol": "default", "template": "t"}, "--template: belongs to"),
        ({"protocol": "rubric", "scale": (0, 2)}, "--scale: belongs to --protocol score: leave"),
        ({"protocol": "rubric", "controls": "blind"}, "--controls: a rubric judge"),
        ({"protocol": "rubric", "template": str(template)}, r"t.txt: expected a place \{aspect\}"),
        ({"protocol": "paper-rubric"}, "--prompts DIR: the paper's protocols need it"),
        ({"protocol": "paper-rubric", "prompts": str(tmp_path)}, "system turn of the paper's .* in none of"),
        (
            {"protocol": "paper-score", "prompts": checkout},
            "--template FILE: --protocol paper-score needs it",
        ),
        ({"protocol": "default", "system": str(template)}, "--system: belongs to --protocol score or rubric"),
        ({"protocol": "score", "system": checkout}, "prompts: cannot be read: .* --system takes"),
    )
    with stand_in(lambda text, _: "1") as server:
        for given, message in cases:
            with pytest.raises(RunError, match=message):
                judged(server, rated_pairs(), tmp_path / "run", **given)
        with pytest.raises(prb.DataError, match="'c0': has no rubric_aspects"):
            judged(server, rated_pairs(rubric_aspects=[]), tmp_path / "run", protocol="rubric")
        assert not server.asked
