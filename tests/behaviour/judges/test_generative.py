"""Generative reward models: roles, replies and scales of each row, and what is known of the person as the principle."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.judges.formats import (
    GENERATIVE,
    find_generative,
    read_brackets,
    read_judgement,
    read_result,
    read_scores,
)
from prb_jax.behaviour.judges.generative import GenerativePairs
from prb_jax.behaviour.judges.judge import open_judge, open_named_judge
from prb_jax.text.tokenizer import load_tokenizer
from tests.behaviour.judges.stand_in import comparisons, completion, judged, stand_in
from tests.json_lines import read_lines, write_lines
from tests.tiny_tokenizer import write_tokenizer


def boxed(scores: str, ranking: str) -> str:
    return (
        f"[The Begin of Individual Scores]\n\\boxed{{{scores}}}\n[The End of Individual Scores]\n"
        f"[The Begin of Ranking Score]\n\\boxed{{{ranking}}}\n[The End of Ranking Score]"
    )


READ = {
    read_scores: {
        '{"score_1": 4, "score_2": 3, "ranking": 2}': "A",
        '```json\n{"score_1": 3, "score_2": 3, "ranking": 5}\n```': "B",
        '{"rubric_evaluations": [{"a": 1}], "overall": {"score_1": 2, "score_2": 5, "ranking": 6}}': "B",
        '{"score_1": 3, "score_2": 3}': None, '{"score_1": 3, "score_2": 3, "ranking": 3.5}': None,
        '{"score_1": 3}': None, '{"score_1": 9, "score_2": 3, "ranking": 1}': None,
        '{"score_1": 3, "score_2": 3, "ranking": 7}': None, '{"score_1": 4, "score_2": 3, "ranking": "x"}': None,
        '{"score_1": NaN, "score_2": 2}': None, "3 and 4": None, "": None,
        boxed("2, 4", "5"): "B", boxed("3, 3", "3"): "A", boxed("3", "2"): None, boxed("3, x", "2"): None,
    },
    read_judgement: {
        "It fits.\nFinal Judgement: Yes": "Yes", "Final Judgement: No.": "No", "Final Judgement: **Yes**": "Yes",
        "Final Judgement: maybe": None, "Yes": None, "Final Judgement: Yes\nFinal Judgement: No": "No",
    },
    read_brackets: {
        "<eval>[[A]] is long</eval><answer>[[B]]</answer>": "B", "[[A]]": "A", "I saw [[A]] and [[B]]": None,
        "[[C]]": None, "<answer>[[equal]]</answer>": None, "A": None,
    },
    read_result: {
        "Feedback: A is fine. [RESULT] B": "B", "[RESULT] (A)": "A", "[RESULT] A or B": None, "[RESULT] C": None,
        "B": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("read", READ)
def test_what_is_read_of_a_reply(read):
    assert {reply: read(reply) for reply in READ[read]} == READ[read]


def test_models_are_found_by_their_names():
    assert find_generative("nvidia/Qwen3-Nemotron-235B-A22B-GenRM-2603") is GENERATIVE["nvidia-genrm"]
    assert find_generative("/models/Skywork-Critic-Llama-3.1-8B/") is GENERATIVE["skywork-critic"]
    assert find_generative("Qwen/Qwen3-32B") is None


def test_pairs_by_roles_with_the_person_as_the_principle(tmp_path, capsys):
    """Both orders; the thoughts and a tie of scores are read past; a reply out of the scale is no verdict."""

    def reply(body: Any, _: int) -> str:
        if len(body["messages"]) == 1:
            return "A"  # to the project's own question
        first, second = (message["content"] for message in body["messages"][-2:])
        if "to 2" in first + second:
            return '{"score_1": 8, "score_2": 2, "ranking": 1}'
        ranking = 2 if len(first) > len(second) else 5
        return f'<think>{{"score_1": 1, "score_2": 5}}</think>{{"score_1": 3, "score_2": 3, "ranking": {ranking}}}'

    rows = [one.to_row() for one in comparisons(3)]
    data, out = write_lines(tmp_path / "data.jsonl", rows), tmp_path / "run"
    with stand_in(reply, whole=True) as server:
        command = [
            "judge",
            "--endpoint",
            server.url,
            "--model",
            "nvidia/Qwen3-Nemotron-235B-A22B-GenRM",
            "--data",
            data,
        ]
        assert cli.main([*command, "--out", str(out), "--protocol", "nvidia-genrm", "--no-progress"]) == 0
        (roles,) = {tuple(m["role"] for m in body["messages"]) for _, body in server.asked}
        assert roles == ("user", "principle", "response_1", "response_2")
        question, principle, *_ = server.asked[0][1]["messages"]
        assert "I like walks" in principle["content"]
        assert (question["content"].startswith("Question"), "walks" in question["content"]) == (True, False)
        assert server.asked[0][1]["max_tokens"] == 8192
        blind = judged(server, comparisons(1), tmp_path / "blind", protocol="nvidia-genrm", profile_posts=0)
        assert [m["role"] for m in server.asked[-1][1]["messages"]] == ["user", "response_1", "response_2"]
        assert blind.summary["accuracy"] == 1.0
        with pytest.warns(
            prb.PrbWarning, match="GenRM: is a generative reward model .*expected --protocol nvidia-genrm"
        ):
            prb.judge(
                None, comparisons(1), out=tmp_path / "wrong", progress=False,
                endpoint=prb.EndpointOptions(url=server.url, model="x/Qwen3-Nemotron-235B-A22B-GenRM"),
            )  # fmt: skip
        named = open_named_judge(f"pairs:{server.url}#nvidia/Qwen3-Nemotron-235B-A22B-GenRM", cache=None)
        assert (named.identity()["judge"], named.identity()["format"]) == ("pairs", "nvidia-genrm")
        (batch,) = named.stream(comparisons(2))
        assert [scores.tolist() for scores in batch.scores] == [[1.0, 0.0]] * 2
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["accuracy"], summary["judge"]["unparsable"]) == (2 / 3, 1)
    assert [row["verdicts"] for row in read_lines(out / "judgements.jsonl")][1:] == [["A", "B"], [None, None]]


def test_a_principle_is_fulfilled_or_not(tmp_path):
    """Yes and No, their log-probabilities where the endpoint tells them, and the project's principle for nobody."""

    def reply(body: Any, _: int) -> Any:
        assert [m["role"] for m in body["messages"]] == ["user", "assistant", "principle"]
        long = "long" in body["messages"][1]["content"]
        text = f"It says Yes.\nFinal Judgement: {'Yes' if long else 'No'}"
        if "top_logprobs" not in body:
            return text
        told = [
            ("It says Yes.\nFinal Judgement:", []),
            (" Yes" if long else " No", [(" Yes", -0.5), (" No", -1.5)]),
        ]
        content = [
            {"token": token, "top_logprobs": [{"token": one, "logprob": logprob} for one, logprob in others]}
            for token, others in told
        ]
        return 200, completion(text, logprobs={"content": content}), {}

    with stand_in(reply, whole=True) as server:
        run = judged(server, comparisons(2), tmp_path / "a", protocol="nvidia-genrm-principle")
        assert [row["ratings"] for row in read_lines(run.out / "judgements.jsonl")] == [[1.0, 0.0]] * 2
        assert (run.summary["accuracy"], run.summary["judge"]["unparsable"]) == (1.0, 0)
        assert "I like walks" in server.asked[0][1]["messages"][2]["content"]
        run = judged(
            server,
            comparisons(1, profile=()),
            tmp_path / "b",
            protocol="nvidia-genrm-principle",
            top_logprobs=5,
        )
        assert (
            server.asked[-1][1]["messages"][2]["content"]
            == "The response gives this user what the user wants."
        )
        assert read_lines(run.out / "judgements.jsonl")[0]["ratings"] == [1.0, 1.0]
        named = open_named_judge(f"judge:{server.url}#Qwen3-Nemotron-32B-GenRM-Principle", cache=None)
        assert named.identity()["judge"] == "nvidia-genrm-principle"


def test_rows_whose_prompt_is_of_their_card(tmp_path):
    template = tmp_path / "card.txt"
    template.write_text("Q {prompt}\n1 {response_a}\n2 {response_b}")

    def reply(text: str, _: int) -> str:
        first, second = (line[2:] for line in text.split("\n")[-2:])
        return f"<answer>[[{'A' if len(first) > len(second) else 'B'}]]</answer>"

    with stand_in(reply) as server:
        run = judged(server, comparisons(2), tmp_path / "run", protocol="rm-r1", template=str(template))
        assert run.summary["accuracy"] == 1.0
        assert "I like walks" in server.asked[0][1]["messages"][0]["content"]


def test_roles_are_written_by_a_chat_template_as_transformers_writes_them(tmp_path: Path):
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    write_tokenizer(tmp_path)
    chat = load_tokenizer(tmp_path, chat_template=template)
    (pair,) = comparisons(1, profile=())
    asked = GenerativePairs(cast(Any, None), True, row=GENERATIVE["nvidia-genrm"]).ask(pair, 0, 10)
    (text, _) = chat.render(asked, generation_prompt=True)
    messages = [{"role": m.role, "content": m.content} for m in asked[0]]
    options = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
    assert text == chat.tokenizer.apply_chat_template(messages, **options)
    assert text == "<user>Question 0?<response_1>a long answer to 0<response_2>no 0<a>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"protocol": "rm-r1"},
            "--template FILE: --protocol rm-r1 needs the user's turn of the model's card",
        ),
        ({"protocol": "nvidia-genrm", "template": "x"}, "nvidia-genrm is asked by the roles of its messages"),
        ({"protocol": "nvidia-genrm", "reason": True}, "--reason: nvidia-genrm thinks unasked"),
        ({"protocol": "nvidia-genrm-principle", "pairing": "all"}, "--pairing: belongs to"),
        ({"protocol": "nvidia-genrm", "top_logprobs": 5}, "--top-logprobs: belongs to"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, message):
    endpoint = prb.EndpointOptions(url="http://127.0.0.1:1/v1", model="m")
    with pytest.raises(prb.RunError, match=message):
        open_judge(None, prb.JudgeOptions(**options), endpoint=endpoint, cache=None)
