"""`prb judge --protocol score`: numbers for single responses, by words, by an endpoint's probabilities, by logits."""

import json
import math
from typing import Any, cast

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.behaviour.judges.chat import InWords
from prb_jax.behaviour.judges.options import JudgeOptions
from prb_jax.behaviour.judges.ratings import NUMBER_AFTER_REASONING, ONE_NUMBER, Ratings, RatingTemplate
from prb_jax.behaviour.judges.scale import Scale
from prb_jax.errors import RunError
from prb_jax.scoring.remote.endpoint import Reply
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.text.prompts import prompt_texts
from tests.behaviour.judges.stand_in import Answer, comparisons, completion, judged, shown_answer, stand_in
from tests.json_lines import read_lines
from tests.tiny_policies import write_policy


def several(count: int) -> list[prb.Comparison]:
    """Comparisons of three responses, of which the longest is the best one."""
    return comparisons(count, ("no", "a long answer to", "hardly"), best=1)


def test_places_of_a_template_are_filled_at_once_and_checked():
    comparison = prb.Comparison(id="7", question="Is {answer} {low}?", chosen="{prompt}", rejected="b")
    template = RatingTemplate("{prompt}|{answer}|{low}-{high}")
    shown = template.conversations(comparison, Scale(0, 5), profile_posts=0)
    assert [messages[0].content for messages in shown] == [
        f"Is {{answer}} {{low}}?|{answer}|0-5" for answer in ("{prompt}", "b")
    ]
    for text, message in (
        ("{prompt}", "{answer}"),
        ("{answer}", "{prompt}"),
        ("{prompt}{answer}{aspects}", "{aspects}"),
    ):
        with pytest.raises(RunError, match=message):
            RatingTemplate(text)
    RatingTemplate(NUMBER_AFTER_REASONING)


def test_ratings_in_words_at_an_endpoint(tmp_path):
    """A judge that is right, but for a comparison that it cannot read and one in which it rates all alike."""

    def reply(text: str, _: int) -> str:
        answer = shown_answer(text)
        if answer == "hardly 0":
            return "I cannot say."
        return "4" if "Question 1?" in text else "8" if answer.startswith("a long") else "2"

    with stand_in(reply) as server:
        run = judged(server, several(6), tmp_path, protocol="score", profile_posts=1)
        assert len(server.asked) == 18
        assert all("I like walks" in body["messages"][0]["content"] for _, body in server.asked)
        assert all("logprobs" not in body for _, body in server.asked)
    assert (run.summary["accuracy"], run.summary["ties"]) == (4 / 6, 2)
    figures = run.summary["judge"]
    assert (figures["unparsable"], figures["unparsable_ratings"], figures["ratings"]) == (1, 1, 18)
    assert figures["mean_rating_of_better"] == pytest.approx((8 + 4 + 4 * 8) / 6)
    assert figures["mean_rating_of_others"] == pytest.approx((2 + 2 * 4 + 8 * 2) / 11)
    rows = read_lines(tmp_path / "judgements.jsonl")
    assert [row["ratings"] for row in rows[:3]] == [[2, 8, None], [4, 4, 4], [2, 8, 2]]
    assert [list(row.scores) for row in run.rows[:2]] == [[5, 5, 5], [4, 4, 4]]


def test_expected_ratings_of_an_endpoint_s_probabilities(tmp_path):
    def told(*tokens: dict[str, float]) -> Answer:
        """A reply of the first of the probable tokens of each place."""
        places = []
        for likely in tokens:
            alternatives = [{"token": token, "logprob": math.log(p)} for token, p in likely.items()]
            places.append({"token": next(iter(likely)), "top_logprobs": alternatives})
        return 200, completion("".join(place["token"] for place in places), logprobs={"content": places}), {}

    def reply(text: str, _: int) -> Answer:
        if "a long" in text:
            return told({"Score": 0.9}, {" 8": 0.5, "6": 0.25, "many": 0.25})
        return told({"none": 0.5, "3": 0.5} if "Question 0?" in text else {"7": 0.8})

    with stand_in(reply) as server:
        run = judged(server, several(2), tmp_path / "a", protocol="score", top_logprobs=5)
        assert all((body["logprobs"], body["top_logprobs"]) == (True, 5) for _, body in server.asked)
    expected = (0.5 * 8 + 0.25 * 6) / 0.75
    (first, _) = read_lines(tmp_path / "a" / "judgements.jsonl")
    assert first["ratings"] == [None, pytest.approx(expected), None]
    assert list(run.rows[1].scores) == pytest.approx([7, expected, 7])
    assert (run.summary["accuracy"], run.summary["judge"]["unparsable"]) == (0.5, 1)
    assert run.summary["judge"]["mean_number_mass"] == pytest.approx((0.75 + 0.75 + 0.8 + 0.8) / 4)
    with (
        stand_in(lambda text, tries: "7") as server,  # an endpoint that does not tell them
        pytest.raises(RunError, match=r"logprobs.content.*leave out --top-logprobs"),
    ):
        judged(server, several(1), tmp_path / "b", protocol="score", top_logprobs=5)


@pytest.mark.parametrize("reason", [False, True])
@pytest.mark.parametrize(
    ("tokens", "place"),
    [
        (["Score", ":", " 7", "/", "9"], 2),
        (["Score", " (", "1", "-", "9", "):", " 7"], 6),
        (["It", " has", " 3", " parts", ".", "\n", "Score", ":", " 7"], 8),
        (["7", " out", " of", " ", "9"], 0),
        (["<think>", "2", "</think>", "7"], 3),
        (["Score", ":", " 7", ".", "5"], None),
        (["Score", ":", " 7", " out", " of", " ", "10"], None),
        (["3", " or", " 4"], None),
        (["3", " problems"], None),
    ],
)
def test_probabilities_are_read_where_the_number_of_the_reply_stands(tokens, place, reason):
    """And not of another number, such as the end of the scale."""
    likely = [(token, [(token, math.log(0.6)), ("8", math.log(0.2))]) for token in tokens]
    model: Any = InWords(cast(Any, None), max_new_tokens=9, alternatives=2)
    judge = Ratings(model, RatingTemplate(ONE_NUMBER), Scale(), reason=reason)
    found = judge._read(Reply("".join(tokens), 0, 0, alternatives=likely))
    assert found == ((None, None) if place is None else pytest.approx((7 * 0.75 + 8 * 0.25, 0.8)))


def test_expected_ratings_of_logits_are_those_of_transformers(tmp_path):
    torch = pytest.importorskip("torch", reason="the oracle")
    folder, data, numbers = tmp_path / "policy", several(2), range(1, 10)
    reference = write_policy(folder, "qwen3", num_hidden_layers=2)
    chat = load_tokenizer(folder)
    ids = [int(chat.tokenize([str(number)])[0][0]) for number in numbers]

    def judged_here(out: str, **options: Any) -> Any:
        asked = JudgeOptions(protocol="score", profile_posts=1, **options)
        return prb.judge(str(folder), data, out=tmp_path / out, options=asked, progress=False)

    run = judged_here("run")
    for comparison, row in zip(data, run.rows, strict=True):
        shown = RatingTemplate(ONE_NUMBER).conversations(comparison, Scale(), profile_posts=1)
        expected = []
        for text in prompt_texts(chat, shown):
            tokens = torch.tensor(chat.tokenize([text])[0][None].astype(np.int64))
            with torch.no_grad():
                logits = reference(tokens).logits[0, -1, ids].double()
            expected.append(float((torch.softmax(logits, -1) * torch.tensor(list(numbers))).sum()))
        assert list(row.scores) == pytest.approx(expected, abs=1e-5)
    assert run.summary["judge"]["unparsable"] == 0
    assert 0 < run.summary["judge"]["mean_number_mass"] < 1  # of the nine numbers among all tokens
    model = json.loads((tmp_path / "run" / "run.json").read_text())["inputs"]["model"]
    assert (model["judge"], model["way"], model["scale"]) == ("score", "logits", [1, 9])
    with pytest.raises(prb.PrbError, match="no single token for 10"):
        judged_here("ten", scale=(1, 10))
