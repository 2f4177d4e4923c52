"""Generative reward models: roles, replies and scales of each row, and what is known of the person as the principle."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.judges.formats import (
    GENERATIVE,
    find_generative,
    read_brackets,
    read_judgement,
    read_list,
    read_result,
    read_scores,
)
from prb_jax.behaviour.judges.generative import GenerativePairs
from prb_jax.behaviour.judges.judge import open_judge, open_named_judge
from prb_jax.behaviour.rl.rewards import check_scoring, open_reward
from prb_jax.behaviour.rl.sections import ScoringJudgeSettings, ScoringSettings
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.serving.item_scorer import open_reward as open_served
from prb_jax.text.open_tokenizer import load_tokenizer
from tests.behaviour.judges.stand_in import StandIn, comparisons, completion, judged, stand_in
from tests.json_lines import read_lines, write_lines
from tests.serving.local_server import serving
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
    read_list: {
        '{"scores": {"model-1": 2, "model-2": 4}, "best-to-worst": ["model-2", "model-1"]}': [2.0, 4.0],
        '```json\n{"scores": {"model-2": 4.5, "model-1": 4.5}, "best-to-worst": ["model-2", "model-1"]}\n```': [
            4.5, 4.51
        ],
        '{"scores": {"model-1": 3, "model-2": 3, "model-3": 5, "model-4": 3}, "best-to-worse": '
        '["model-3", "model-4", "model-1", "model-2"]}': [3.01, 3.0, 5.0, 3.02],
        '{"scores": {"model-1": 3, "model-2": 3}}': [3.0, 3.0],
        '{"scores": {"model-1": 3, "model-2": 3}, "best-to-worst": ["model-1", "model-1"]}': [3.0, 3.0],
        '{"scores": {"model-1": 1}} or rather {"scores": {"model-1": 5}}': [5.0],
        '{"scores": {"model-1": 3, "model-2": 6}}': None, '{"scores": {"model-1": 3, "model-3": 4}}': None,
        '{"scores": {"model-1": 3, "model-2": NaN}}': None, '{"scores": [3, 4]}': None, '{"scores": {}}': None,
        '{"best-to-worst": ["model-1"]}': None, "4 and 3": None, "{" * 99 + "[" * 9999: None,
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


@pytest.fixture
def list_judge(tmp_path: Path) -> Iterator[tuple[StandIn, list[str]]]:
    """A judge of lists that prefers long responses, and the flags that name its system turn."""

    def reply(body: Any, _: int) -> str:
        system, user = body["messages"]
        assert (system["role"], system["content"]) == ("system", "\nScore all of them.\n")
        asked = json.loads(user["content"])
        assert list(asked) == ["principle", "prompt", "responses"]
        if "mute" in asked["prompt"]:
            return '{"scores": {"model-1": 5}}'
        lengths = {name: len(text) for name, text in asked["responses"].items()}
        listed = sorted(lengths, key=lambda name: -lengths[name])
        scores = {name: min(5, lengths[name]) for name in listed}
        return f"<think>{{}}</think>```json\n{json.dumps({'scores': scores, 'best-to-worst': listed})}\n```"

    (tmp_path / "system.txt").write_text("Score all of them.\n")
    with stand_in(reply, whole=True) as server:
        yield server, ["--system", str(tmp_path / "system.txt")]


def test_a_list_is_scored_by_the_principle_of_its_user(list_judge, tmp_path):
    """One request for all responses in random order; equal scores are told apart; half a reply is a tie."""
    server, system = list_judge
    texts, post = ("a", "sevenxy", "eight xy", "three"), {"id": "p", "category": "", "text": "I like walks."}
    rows = [
        {"id": f"c{k}", "user_id": "u", "question": "Tea?", "responses": texts, "labels": [0, 0, 1, 0]}
        | {"profile": [post]}
        for k in range(3)
    ]  # fmt: skip
    data = write_lines(tmp_path / "data.jsonl", [*rows, {**rows[0], "id": "mute", "question": "mute"}])
    command = ["judge", "--endpoint", server.url, "--model", "m", "--data", data, "--no-progress", *system]
    assert cli.main([*command, "--protocol", "rewardanything", "--out", str(tmp_path / "run")]) == 0
    judged = read_lines(tmp_path / "run" / "judgements.jsonl")
    assert judged[0]["ratings"] == pytest.approx([1.0, 5.01, 5.02, 5.0])
    assert (judged[3]["ratings"], len(server.asked)) == ([None] * 4, 4)
    assert len({tuple(row["order"]) for row in judged}) > 1
    asked = json.loads(server.asked[0][1]["messages"][1]["content"])
    assert asked["principle"].startswith("The response gives this user what the user wants.\n\n")
    assert ("I like walks" in asked["principle"], asked["prompt"]) == (True, "Tea?")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["accuracy"], summary["judge"]["unparsable"], summary["judge"]["scale"]) == (
        0.75,
        1,
        [1, 5],
    )


def test_a_list_is_a_reward(list_judge, tmp_path):
    """By best of n, `prb.reward_fn`, `prb serve` and `prb ppo`: the scores of the group."""
    server, (_, system) = list_judge
    name, texts = f"pairs:{server.url}#zhuohaoyu/RewardAnything-8B-v1", ["a", "sevenxy", "eight xy", "three"]
    expected, options = [1.0, 5.01, 5.02, 5.0], prb.JudgeOptions(system=system)
    found = prb.reward_fn(name, judge=options)(prompts=["Tea?"] * 4, completions=texts)
    assert found == pytest.approx(expected)
    with serving(open_served(name, LoadOptions(), judge=options)) as url:
        objects = [
            {"output": [{"type": "message", "content": [{"type": "output_text", "text": text}]}]}
            for text in texts
        ]
        asked = {"conversation_history": [{"role": "user", "content": "Tea?"}], "response_objs": objects}
        assert httpx.post(f"{url}/compare", json=asked).json()["rewards"] == pytest.approx(expected)
    scoring = ScoringSettings(judge=ScoringJudgeSettings(system=system))
    reward = open_reward(PpoSettings(scoring=scoring), name, out=tmp_path)
    check_scoring(scoring, [reward])
    np.testing.assert_allclose(reward.score(comparisons(1), [texts], step=1).values, [expected], rtol=1e-6)
    samples = write_lines(
        tmp_path / "samples.jsonl",
        [{"id": "c0", "sample": k, "text": text} for k, text in enumerate(texts)],
    )
    quality = write_lines(
        tmp_path / "quality.jsonl", [{"id": "c0", "sample": k, "quality": int(k == 2)} for k in range(4)]
    )
    data = write_lines(tmp_path / "data.jsonl", [comparisons(1)[0].to_row()])
    command = ["best-of-n", "--samples", samples, "--data", data, "--rewards", name, "--quality", quality]
    command += ["--system", system, "--out", str(tmp_path / "best"), "--no-progress"]
    assert cli.main(command) == 0
    (curve,) = (
        points
        for scorer, points in json.loads((tmp_path / "best" / "summary.json").read_text())["curves"].items()
        if scorer.startswith("pairs:")
    )
    assert curve[-1]["quality"] == 1.0
    assert cli.main([*command, "--pairing", "circular"]) == 2


def test_texts_of_the_authors_are_used_by_a_policy_s_reward(tmp_path):
    """A row whose prompt is of its card, as the reward of `prb ppo`."""
    (tmp_path / "card.txt").write_text("Q {prompt}\n1 {response_a}\n2 {response_b}")

    def reply(text: str, _: int) -> str:
        first, second = (line[2:] for line in text.split("\n")[-2:])
        return f"[[{'A' if len(first) > len(second) else 'B'}]]"

    scoring = ScoringSettings(judge=ScoringJudgeSettings(template=str(tmp_path / "card.txt")))
    with stand_in(reply) as server:
        name = f"pairs:{server.url}#Skywork/Skywork-Critic-Llama-3.1-8B"
        reward = open_reward(PpoSettings(scoring=scoring), name, out=tmp_path)
        check_scoring(scoring, [reward])
        scores = reward.score(comparisons(1, profile=()), [["a", "bbb", "cc"]], step=1)
    np.testing.assert_allclose(scores.values, [[0.0, 1.0, 0.5]])
    wrong = ScoringSettings(judge=ScoringJudgeSettings(template=str(tmp_path / "card.txt"), highest=5))
    with pytest.raises(prb.RunError, match=r"'scoring\.judge\.highest': not used by"):
        check_scoring(wrong, [reward])


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
        ({"protocol": "rewardanything"}, "--system FILE: --protocol rewardanything needs the system turn"),
        (
            {"protocol": "rewardanything", "system": __file__, "template": "x"},
            "--template: rewardanything is asked in",
        ),
        ({"protocol": "rewardanything", "system": __file__, "pairing": "all"}, "--pairing: belongs to"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, message):
    endpoint = prb.EndpointOptions(url="http://127.0.0.1:1/v1", model="m")
    with pytest.raises(prb.RunError, match=message):
        open_judge(None, prb.JudgeOptions(**options), endpoint=endpoint, cache=None)
