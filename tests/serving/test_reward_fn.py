"""`prb.reward_fn` in the call shapes of TRL, verl and AReaL."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.comparison import Message
from prb_jax.scoring.personalised import PersonalisedModel
from prb_jax.serving.item_scorer import comparison_scores, open_reward
from prb_jax.serving.items import ChatItem, Score
from prb_jax.serving.tree_scorer import open_tree_scorer
from prb_jax.text.view import ViewOptions
from prb_jax.trees.tree import TooLongError
from tests import tiny_tokenizer as tiny
from tests.behaviour.judges.stand_in import stand_in
from tests.json_lines import read_lines
from tests.plain_process import plain_environment
from tests.scoring.records import write_model
from tests.serving.local_server import serving
from tests.serving.verifiers_trace import task, trace

QUESTION, ANSWERS = "Tea or coffee?", ["Tea, of course.", "Coffee.", "Tea, of course."]
POSTS = [{"id": "1", "category": "food", "text": "Coffee keeps me awake."}]
MESSAGES = [{"role": "user", "content": QUESTION}]


def test_each_form_of_a_call_gives_the_model_s_rewards(model: prb.RewardModel) -> None:
    """Beside those of `test_trainers.py`: plain texts, arrays of tunix, every field in which verl may have a prompt."""

    def offline(posts: Any = (), question: str = QUESTION) -> Any:
        given = prb.Comparison(id="1", question=question, responses=ANSWERS, profile=posts)
        return pytest.approx(model.score(given).tolist(), abs=1e-5)

    reward = prb.reward_fn(model, batch_tokens=512)
    common: dict[str, Any] = {"completion_ids": [[1]] * 3, "trainer_state": None, "chosen": ["x"] * 3}
    assert reward(prompts=[QUESTION] * 3, completions=ANSWERS, **common) == offline()
    assert reward(np.array([QUESTION] * 3), np.array(ANSWERS)) == offline()
    profiles = np.empty(3, object)
    profiles[:] = [POSTS] * 3
    arrays = {"completions": np.array(ANSWERS), "user_id": np.array([7, 7, 7]), "profile": profiles}
    assert reward(prompts=np.array([QUESTION] * 3), **arrays) == offline(POSTS)
    assert offline(POSTS).expected != offline()

    def verl(answer: str, **extra: Any) -> float:
        return reward(data_source="d", solution_str=answer, ground_truth=None, extra_info=extra)

    assert [verl(answer, query=QUESTION, index=3) for answer in ANSWERS] == offline()
    assert [verl(answer, prompt=MESSAGES, profile=POSTS) for answer in ANSWERS] == offline(POSTS)
    assert [verl(answer, query=QUESTION, profile=json.dumps(POSTS)) for answer in ANSWERS] == offline(POSTS)
    placed = [reward("d", answer, None, {"query": QUESTION, "profile": POSTS}) for answer in ANSWERS]
    assert placed == offline(POSTS)
    info = {"user_id": "u", "profile": POSTS}
    for given in (info, json.dumps(info)):  # verifiers
        of_rubric = {"prompt": MESSAGES, "answer": "", "state": {"turn": 1}, "task": "t", "info": given}
        turns = [[{"role": "assistant", "content": answer}] for answer in ANSWERS]
        assert [reward(completion=turn, **of_rubric) for turn in turns] == offline(POSTS)
    whole = [[*MESSAGES, {"role": "assistant", "content": answer}] for answer in ANSWERS]
    for messages in (whole, [MESSAGES] * 3):  # ms-swift
        assert reward(ANSWERS, messages=messages, profile=[POSTS] * 3, solution=["x"] * 3) == offline(POSTS)
    as_text = [verl(answer, query=QUESTION, profile="Post 1: tea") for answer in ANSWERS]
    assert as_text == offline(question=QUESTION + "Post 1: tea")
    areal = [reward(QUESTION, answer, [1], [2], profile=POSTS, task_id=7) for answer in ANSWERS]
    assert areal == offline(POSTS)
    rendered = f"<start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n"
    ended = [f"{answer}<|im_end|>\n<|im_end|>" for answer in ANSWERS]
    columns = {"profile": POSTS, "messages": MESSAGES}
    assert [reward(rendered, answer, [1], [2], **columns) for answer in ended] == offline(POSTS)
    for call in (
        lambda: reward(rendered, ANSWERS[0], [1], [2]),
        lambda: reward(prompts=[rendered], completions=["a"]),
        lambda: reward(solution_str="a", extra_info={"query": rendered}),
    ):
        with pytest.raises(
            prb.DataError, match="'<start_of_turn>', so a chat template has rendered it already"
        ):
            call()


def test_whatever_scores_is_a_reward_and_goes_to_other_processes_by_name(model: prb.RewardModel) -> None:
    def longest(comparison: prb.Comparison) -> list[int]:
        return [len(response) + (comparison.user_id == "u") for response in comparison.responses]

    sent = {"prompts": [QUESTION] * 3, "completions": ANSWERS}
    lengths = [float(len(answer)) for answer in ANSWERS]
    assert prb.reward_fn(longest)(**sent) == lengths
    of_users = prb.reward_fn(longest)(**sent, user_id=["u", None, "u"])
    assert of_users == [lengths[0] + 1, lengths[1], lengths[2] + 1]
    for name in ("baseline:length", model.name):
        reward = prb.reward_fn(name)
        assert pickle.loads(pickle.dumps(reward))(**sent) == pytest.approx(reward(**sent), abs=1e-5)
    for loaded, options in ((model, {"batch_tokens": 512}), (longest, {}), (prb.load("baseline:length"), {})):
        for send in (pickle.dumps, lambda reward: pickle.dumps(partial(reward, QUESTION))):
            with pytest.raises(
                TypeError, match="give reward_fn the path or name of the model, or the URL of a r"
            ):
                send(prb.reward_fn(loaded, **options))
    with pytest.raises(prb.RunError, match="max_length: no effect on baseline:length"):
        prb.reward_fn("baseline:length", max_length=5)


def test_judges_and_functions_of_files_are_rewards_too(tmp_path: Path) -> None:
    """In this process, behind `prb serve`, and (functions, which are known by their file) in `prb evaluate`."""
    file = tmp_path / "own.py"
    file.write_text(
        "def wanted(comparison):\n    return [text.count(comparison.user_id or '-') for text in comparison.responses]"
    )
    name = f"{file}:wanted"
    sent = {"prompts": [QUESTION] * 2, "completions": ["u and u", "v"], "user_id": ["u", "u"]}
    assert prb.reward_fn(name)(**sent) == [2.0, 0.0]
    with serving(open_reward(name, LoadOptions())) as url:
        client = prb.reward_fn(url)
        assert client(**sent) == [2.0, 0.0]
    scorer: Any = prb.load(name)
    assert scorer.identity()["sha256"] == sha256(file.read_bytes()).hexdigest()
    pair = {"id": "1", "question": QUESTION, "chosen": "u", "rejected": "v", "user_id": "u"}
    assert prb.evaluate(name, [pair], progress=False).summary["accuracy"] == 1.0
    for broken, message in (
        (f"{tmp_path}/no.py:f", "no such file; expected a Python file"),
        (f"{file}:other", "expected 'other' in it, found none"),
    ):
        with pytest.raises(prb.RunError, match=message):
            prb.reward_fn(broken)

    def reply(asked: str, tries: int) -> str:
        return "no number" if "silent" in asked else str(len(re.findall("soup", asked)))

    with stand_in(reply) as endpoint:
        judge = f"judge:{endpoint.url}#m"
        asked = {"prompts": [QUESTION] * 2, "completions": ["soup", "soup and soup"]}
        assert prb.reward_fn(judge)(**asked) == [1.0, 2.0]
        asked |= {"profile": [[{"id": "1", "category": "", "text": "soup"}]] * 2}
        with serving(open_reward(judge, LoadOptions())) as url:
            assert prb.reward_fn(url)(**asked) == [2.0, 3.0]
            with pytest.raises(prb.RunError, match=r"status 422.*names no number of its scale"):
                prb.reward_fn(url)(prompts=[QUESTION], completions=["silent"])
        assert not list(tmp_path.glob("**/replies"))
        with pytest.raises(prb.DataError, match=r"completion 0: .*names no number of its scale"):
            prb.reward_fn(judge)(prompts=[QUESTION], completions=["silent"])
        alone = "has prompts of its own: leave it out; pairs:MODEL compares the responses of a prompt"
        for given, options, message in (
            (judge, {"protocol": "paper"}, alone),
            (judge, {"max_length": 99}, "has its own limit"),
            (judge, {"history": []}, "does not adapt to users"),
            (f"rubric:{endpoint.url}#m", {}, "the true rubric, which no request contains; use judge:MODEL"),
            ("baseline:length", {"judge": prb.JudgeOptions(template="x")}, "is not a judge"),
        ):
            with pytest.raises(prb.RunError, match=message):
                prb.reward_fn(given, **options)


def test_there_is_no_default_reward(model: prb.RewardModel) -> None:
    reward = prb.reward_fn(model, batch_tokens=512, max_length=64)
    for given, message in (
        ({"prompts": [QUESTION], "completions": [""]}, "completion 0 is empty"),
        ({"prompts": [QUESTION] * 2, "completions": ["a"]}, "one for each of the 2 prompts"),
        (
            {"prompts": [QUESTION] * 2, "completions": ["a", "b"], "profile": [POSTS]},
            "profile: expected one for each of 2 completions",
        ),
        ({"prompts": [QUESTION] * 2, "completions": ["a", "tea " * 200]}, "completion 1: "),
        ({"solution_str": "a", "extra_info": {"index": 1}}, "expected the question as query or question or prompt"),
        ({"solution_str": "a", "extra_info": None}, "extra_info"),
        ({"texts": ["a"]}, "found texts"),
        ({"completions": ["a"], "messages": [MESSAGES] * 2}, "messages: expected a conversation for each of 1"),
        (
            {"completions": ["a"], "messages": [[*MESSAGES, {"role": "assistant", "content": "b"}]]},
            r"messages\[0\]: expected to end with completion 0",
        ),
        (
            {"prompt": MESSAGES, "completion": "a", "info": {"user": "u"}},
            "reward_fn: info: field 'user': unknown; expected 'user_id'",
        ),
        (
            {"prompt": MESSAGES, "completion": "a", "info": {"user_id": "u"}, "user_id": "v"},
            "reward_fn: field 'user_id': expected 'u', as in info, found 'v'",
        ),
        ({"prompts": [MESSAGES], "completions": [MESSAGES]}, "the assistant's message at the end"),
    ):  # fmt: skip
        with pytest.raises(prb.DataError, match=message):
            reward(**given)
    kind = prb.reward_fn(model, batch_tokens=512, empty=-3.0)
    rewards = kind(prompts=[QUESTION] * 2, completions=["", ANSWERS[1]])
    assert rewards == [-3.0, pytest.approx(model.reward(QUESTION, ANSWERS[1]), abs=1e-5)]


def test_a_prompt_that_the_model_s_own_template_has_rendered(model: prb.RewardModel) -> None:
    """Marks that no list holds: refused in every form; a question that quotes one has the score of the question."""
    reward, quoted = prb.reward_fn(model, batch_tokens=512), "What does <|start|> do, before <|end|>?"
    expected = pytest.approx(model.reward(quoted, "It opens a turn."), abs=1e-5)
    with serving(model, batch_tokens=512) as url:

        def classified(text: str) -> httpx.Response:
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "It opens a turn."}]
            return httpx.post(f"{url}/classify", json={"messages": turns})

        for rendered in (
            "<|start|>of tea?",
            "Be kind.<|end|>\n<|start|>user\nTea?",
            "Tea?<|end|>\n<|start|>assistant\n",
        ):
            for prompt in (rendered, [{"role": "user", "content": rendered}]):
                with pytest.raises(prb.DataError, match=r"holds '<\|start\|>"):
                    reward(prompts=[prompt], completions=["It opens a turn."])
            assert "holds '<|start|>'" in classified(rendered).text
        for prompt in (quoted, [{"role": "user", "content": quoted}]):
            assert reward(prompts=[prompt], completions=["It opens a turn."]) == [expected]
        assert classified(quoted).json()["data"][0]["probs"] == [expected]
    fitted: Any = SimpleNamespace(embedder=SimpleNamespace(model=model))  # a fitted method asks its backbone
    assert PersonalisedModel.rendered_mark(fitted, "<|start|>of tea?") == "<|start|>"
    score, _ = comparison_scores(model, ViewOptions())  # the way of every scorer but reward models
    items = [
        ChatItem((Message("user", text),), "a") for text in ("<|start|>of tea?", "Tea?", "<|start|>of tea?")
    ]
    first, second, third = score(items)
    assert (type(first), type(third)) == (prb.DataError, prb.DataError)
    assert isinstance(second, Score)
    assert second.value == pytest.approx(model.reward("Tea?", "a"), abs=1e-5)


def test_what_each_completion_must_have() -> None:
    reward = prb.reward_fn("baseline:length", require=("user_id", "profile"))
    sent: dict[str, Any] = {
        "prompts": [QUESTION] * 2,
        "completions": ANSWERS[:2],
        "profile": [json.dumps(POSTS)] * 2,
    }
    assert reward(**sent, user_id=["u", "v"]) == [float(len(answer)) for answer in ANSWERS[:2]]
    for user_id in (["u", None], None):
        place = 1 if user_id else 0
        with pytest.raises(
            prb.DataError, match=f"^reward_fn: completion {place}: field 'user_id': missing, and requ"
        ):
            reward(**sent, user_id=user_id)
    with pytest.raises(prb.RunError, match="require: expected user_id or profile, found 'user'"):
        prb.reward_fn("baseline:length", require=("user",))


POOLS = """
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
import prb_jax as prb

def opened():
    import prb_jax.serving.reward_fn as module
    return len(module._opened)

def call(pool, answer):
    return pool.submit(partial(reward, "Tea or coffee?"), answer, [1], [2], user_id="u").result(300)

if __name__ == "__main__":
    reward = prb.reward_fn(sys.argv[1], profile_posts=0)
    values = {}
    for method in ("fork", "spawn"):
        with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
            values[method] = [call(pool, answer) for answer in ("Tea.", "Coffee.")]
            assert pool.submit(opened).result() == 1
    here = [reward("Tea or coffee?", answer, [1], [2]) for answer in ("Tea.", "Coffee.")]
    for method, found in values.items():
        assert max(abs(a - b) for a, b in zip(found, here)) < 1e-5, (method, found, here)
    assert here[0] != here[1]
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        try:
            call(pool, "Tea.")
        except prb.RunError as error:
            assert "forked after JAX had started" in str(error) and "its URL" in str(error)
            print("as expected")
"""


def test_pools_of_processes_open_the_model_once(model: prb.RewardModel, tmp_path: Path) -> None:
    """AReaL sends the function to a pool: forked and spawned ones give the model's rewards, or one clear error."""
    script = tmp_path / "pools.py"
    script.write_text(POOLS)
    done = subprocess.run([sys.executable, script, model.name], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout.strip()) == (0, "as expected"), done.stderr[-2000:]


def each_call(columns: dict[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """The call of each trainer for two completions, or one of them, with further columns or fields."""
    listed = {name: [None, value] for name, value in columns.items()}
    label = {"question": QUESTION, **columns}
    return {
        "TRL": lambda reward: reward(prompts=[QUESTION] * 2, completions=ANSWERS[:2], **listed),
        "whole": lambda reward: reward(prompts=[QUESTION] * 3, completions=ANSWERS, **columns),
        "verl": lambda reward: reward(solution_str="a", extra_info={"question": QUESTION, **columns}),
        "verl's batches": lambda reward: reward(
            solution_strs=["a"], extra_infos=[{"question": QUESTION, **columns}]
        ),
        "AReaL": lambda reward: reward(QUESTION, "a", [1], [2], **columns),
        "OpenRLHF": lambda reward: reward(["qa"], ["q"], [label]),
    }


@pytest.mark.parametrize("call", each_call({}))
def test_a_column_that_nearly_says_whose_reward_it_is_is_refused(call: str) -> None:
    """As the server refuses it, and so behind its client; with one mechanism."""
    scorer = prb.reward_fn("baseline:length")
    with serving(prb.load("baseline:length")) as url:
        for reward in (scorer, prb.reward_fn(url)):
            for name, meant in (
                ("user", "user_id"), ("userId", "user_id"), ("usr_id", "user_id"), ("user_ids", "user_id"),
                ("history", "profile"), ("profiles", "profile"), ("profil", "profile"), ("Profile", "profile"),
                ("profile_ordr", "profile_order"), ("persona", "user_id"), ("person_id", "user_id"),
                ("annotator_id", "user_id"), ("worker_id", "user_id"), ("user_name", "user_id"),
                ("customer_id", "user_id"), ("user_history", "profile"), ("profile_text", "profile"),
            ):  # fmt: skip
                with pytest.raises(
                    prb.DataError, match=f"field '{name}': unknown; expected '{meant}' for whose"
                ):
                    each_call({name: "u"})[call](reward)
            own = {
                "trainer_state": 1,
                "prompt_ids": [1],
                "index": 3,
                "split": "train",
                "user": None,
                "used": 1,
            }
            each_call(own)[call](reward)
        for name in ("documents", "images"):
            with pytest.raises(prb.DataError, match=f"field '{name}': is not rendered"):
                each_call({name: ["kettle"]})[call](scorer)
            each_call({name: []})[call](scorer)


def test_what_is_refused_names_its_row_and_place() -> None:
    reward = prb.reward_fn("baseline:length")
    columns = {"prompts": [QUESTION] * 2, "completions": ANSWERS[:2]}
    turn = {"role": "assistant", "content": "a", "images": ["kettle.png"]}
    for given, message in (
        (columns | {"user": [None, "u"]}, "^reward_fn: completion 1: field 'user': unknown"),
        (columns | {"tools": [[], ["kettle"]]}, r"^reward_fn: completion 1: field 'tools\[0\]': expected an object"),
        (columns | {"completions": [[turn], [turn]]}, r"field 'completions\[0\]\[0\].images': is not rendered"),
        (columns | {"prompts": [[turn]] * 2}, r"field 'prompt\[0\].images': is not rendered"),
        ({"solution_str": "a", "extra_info": {"query": "q", "users": 1}}, "^reward_fn: extra_info: field 'users'"),
        ({"solution_str": "a", "extra_info": {"query": "q"}, "user_id": "u"}, "^reward_fn: field 'user_id': not read"),
    ):  # fmt: skip
        with pytest.raises(prb.DataError, match=message):
            reward(**given)
    with pytest.raises(prb.DataError, match=r"^reward_fn: field 'user_id': not read here"):
        reward(["qa"], ["q"], [{"question": QUESTION}], user_id=["u"])


def test_tools_calls_thoughts_and_several_turns_are_scored_whole(tmp_path: Path) -> None:
    """By every trainer's call, by routes of the server, and by its client: as by the model itself."""
    folder = write_model(tmp_path / "model", "qwen3", template=tiny.WITH_TOOLS, num_hidden_layers=1)
    model = prb.load(folder)
    call = {"type": "function", "function": {"name": "kettle", "arguments": {"cups": 1}}}
    turns: list[list[dict[str, Any]]] = [
        [{"role": "assistant", "content": None, "tool_calls": [call]}],
        [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "name": "kettle", "content": "hot"},
            {"role": "assistant", "content": "Tea.", "reasoning_content": "The water is hot."},
        ],
        [{"role": "assistant", "content": "Tea."}],
    ]
    about: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "kettle"}}]}
    about |= {"user_id": "u", "profile": POSTS}
    whole = prb.Comparison(id="1", prompt=MESSAGES, responses=turns, **about)
    system = [{"role": "system", "content": "Be brief."}]
    apart = prb.Comparison(
        id="2", responses=[[*MESSAGES, *turns[0]], [*system, *MESSAGES, *turns[2]]], **about
    )
    scores, others = (model.score(one, profile_posts=1).tolist() for one in (whole, apart))
    expected = pytest.approx(scores, abs=1e-5)
    plain = [
        model.score(prb.Comparison(**given, responses=turns[2:], profile=POSTS), profile_posts=1)[0]
        for given in ({"prompt": MESSAGES}, {"prompt": MESSAGES, "tools": about["tools"]})
    ]
    assert len({round(score, 4) for score in (*scores, *others, *map(float, plain))}) == 6 - 1
    reward = prb.reward_fn(model, batch_tokens=512, profile_posts=1)
    columns = {name: [value] * 3 for name, value in about.items()}
    assert reward(prompts=[MESSAGES] * 3, completions=turns, **columns) == expected
    assert [reward(MESSAGES, turn, [1], [2], **about) for turn in turns] == expected
    calls = [copy.deepcopy(turn) for turn in turns]
    for turn in calls:  # verifiers holds arguments as the model wrote them
        for one in turn[0].get("tool_calls") or ():
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
    judged = task(QUESTION, user_id="u", profile=POSTS)
    assert [reward(judged, trace([*MESSAGES, *turn], about["tools"])) for turn in calls] == expected
    for turn in calls:  # a rubric of verifiers 0.1: objects of pydantic; the user in columns or in `info`
        said = trace([*MESSAGES, *turn], about["tools"])
        given = {
            "prompt": said.messages[:1],
            "completion": said.messages[1:],
            "state": {"tool_defs": said.tools},
        }
        for message in said.messages:  # thoughts of some providers are blocks
            if thought := message.fields.pop("reasoning_content", None):
                message.fields["thinking_blocks"] = [{"type": "thinking", "thinking": thought}]
        user = {"user_id": "u", "profile": POSTS}
        both = [reward(**given, answer="", task=None, **user), reward(**given, answer="", info=user, **user)]
        assert both == pytest.approx([scores[calls.index(turn)]] * 2, abs=1e-5)
    extra = {"question": MESSAGES, **about}
    assert reward(solution_str="Tea.", extra_info=extra) == pytest.approx(scores[2], abs=1e-5)
    label = {"question": QUESTION, **about}
    (answer,) = reward(["qTea."], ["q"], [label])["rewards"]
    assert answer == pytest.approx(scores[2], abs=1e-5)
    with serving(model, batch_tokens=512, view=prb.ViewOptions(profile_posts=1)) as url:
        sent = [{"messages": [*MESSAGES, *turn], **about} for turn in turns]
        answers = [httpx.post(f"{url}/classify", json=body).json()["data"][0]["probs"][0] for body in sent]
        assert answers == expected
        remote = prb.evaluate(url, [prb.Comparison(**one.to_row() | {"labels": labels}) for one, labels in (
            (whole, [1, 0, 0]), (apart, [1, 0])
        )], out=tmp_path / "run", progress=False)  # fmt: skip
        assert remote.summary["n"] == 2
        rows = read_lines(tmp_path / "run" / "scores.jsonl")
        assert [row["scores"] for row in rows] == [expected, pytest.approx(others, abs=1e-5)]
        refused = httpx.post(f"{url}/classify", json={"input": "Tea.", "tools": about["tools"]})
        assert (refused.status_code, "'tools': is not rendered" in refused.text) == (400, True)


def test_a_trace_that_cannot_be_scored_is_named() -> None:
    """Of verifiers: another agent's conversation, no reply, calls that no template reads, a misnamed person."""
    reward = prb.reward_fn("baseline:length")
    said = {"role": "assistant", "content": "Tea."}
    whole = trace([*MESSAGES, said])
    assert (
        reward(task=task(QUESTION), trace=whole)
        == reward(task(QUESTION), whole)
        == reward(prompt=MESSAGES, completion="Tea.")
    )
    custom = trace([*MESSAGES, said])
    custom.messages[-1].fields["tool_calls"] = [
        {"id": "c", "type": "custom", "name": "kettle", "arguments": "hot"}
    ]
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "kettle.png"}}]}
    for judged, given, message in (
        (task(QUESTION), trace([]), "trace: expected the assistant's message at the end, found no message"),
        (
            task(QUESTION),
            trace(MESSAGES),
            "trace: expected the assistant's message at the end, found 'user'",
        ),
        (
            task(QUESTION),
            trace([*MESSAGES, said], root_reply="Coffee."),
            "root agent's reply, 'Coffee.', found 'Tea.'",
        ),
        (task(QUESTION), custom, "tool_calls: expected functions without a namespace, found"),
        (task(QUESTION), trace([image, said]), "type': expected 'text', found"),
        (task(QUESTION, user="u"), whole, "^reward_fn: task: field 'user': unknown; expected 'user_id'"),
        (task(QUESTION), trace([*MESSAGES, said | {"content": None}]), "completion 0 is empty"),
    ):
        with pytest.raises(prb.DataError, match=message):
            reward(judged, given)


def test_the_order_of_a_profile_is_shown(model: prb.RewardModel) -> None:
    ordered = prb.Comparison(
        id="1", question=QUESTION, responses=ANSWERS[:2], profile=POSTS, profile_order="recency"
    )
    expected = pytest.approx(model.score(ordered).tolist(), abs=1e-5)
    plain = prb.Comparison(id="1", question=QUESTION, responses=ANSWERS[:2], profile=POSTS)
    assert expected != model.score(plain).tolist()
    reward = prb.reward_fn(model, batch_tokens=512)
    about = {"profile": POSTS, "profile_order": "recency"}
    listed = {name: [value] * 2 for name, value in about.items()}
    assert reward(prompts=[QUESTION] * 2, completions=ANSWERS[:2], **listed) == expected
    extra = {"question": QUESTION, **about}
    assert reward(solution_strs=ANSWERS[:2], extra_infos=[extra] * 2) == expected
    assert [reward(QUESTION, answer, [1], [2], **about) for answer in ANSWERS[:2]] == expected


def test_a_call_of_which_nothing_can_be_scored(model: prb.RewardModel) -> None:
    reward = prb.reward_fn(model, batch_tokens=512, max_length=64, empty=-10.0)
    assert reward(prompts=[QUESTION] * 2, completions=["", ""]) == [-10.0, -10.0]
    assert reward(prompts=[], completions=[]) == []
    assert reward(solution_str="", extra_info={"query": QUESTION}) == -10.0
    with pytest.raises(
        prb.DataError, match=r"completion 0: .* leaves no room for the prompt within max_length 64"
    ):
        reward(prompts=[QUESTION] * 2, completions=["tea " * 200] * 2)
    score = open_tree_scorer(model, ViewOptions(max_length=64), batch_tokens=512)
    long = ChatItem((Message("user", QUESTION),), "tea " * 200)
    assert [type(answer) for answer in score([long, long])] == [TooLongError] * 2
    assert score([]) == []


def test_trl_trains_with_it(model: prb.RewardModel, tmp_path: Path) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model.name)
    config = Qwen2Config(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    rows = [{"prompt": MESSAGES, "profile": POSTS, "user_id": "u"}] * 4
    seen: list[Any] = []
    reward = prb.reward_fn(model, batch_tokens=512, empty=0.0)

    def watched(**given: Any) -> list[float]:
        rewards = reward(**given)
        seen.append((given["prompts"], given["completions"], given["profile"], rewards))
        return rewards

    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, num_generations=2, max_completion_length=8,
        max_steps=2, report_to=[], use_cpu=True, bf16=False, logging_steps=1, save_strategy="no", temperature=1.0,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=Qwen2ForCausalLM(config),
        reward_funcs=[reward, watched],
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "rewards/prb_reward/mean" in row]
    assert len(logged) == 2
    for (prompts, completions, profiles, rewards), row in zip(seen, logged, strict=True):
        for prompt, completion, profile, value in zip(prompts, completions, profiles, rewards, strict=True):
            text = completion[0]["content"]
            expected = model.reward(prompt, text, profile=profile) if text else 0.0
            assert value == pytest.approx(expected, abs=1e-5)
        assert row["rewards/prb_reward/mean"] == pytest.approx(np.mean(rewards), abs=1e-5)


def test_the_devices_of_a_learner_hold_the_reward_too(model: prb.RewardModel, tmp_path: Path) -> None:
    """Four devices under a mesh with the axes of tunix, also while it is the mesh in use: the scores of one device."""
    out = tmp_path / "out.json"
    run = subprocess.run(
        [sys.executable, "-m", "tests.serving.reward_on_mesh", model.name, str(out)],
        env=plain_environment(devices=4), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    given = prb.Comparison(id="1", question=QUESTION, responses=ANSWERS, profile=POSTS)
    expected = pytest.approx(model.score(given).tolist(), abs=1e-5)
    assert [found[name] for name in ("by name", "loaded", "in use")] == [expected] * 3
    assert found["devices"] == 4
    assert "the model was loaded on 1 devices, and the mesh has 4 or other ones" in found["elsewhere"]
    assert "cannot go to another process" in found["pickled"]
    with pytest.raises(prb.RunError, match="mesh"):
        prb.reward_fn("baseline:length", mesh="fsdp=1")


@pytest.mark.parametrize("mark", ["<|im_end|>", "<end_of_turn>\n", "</s>"])
def test_a_completion_has_no_end_of_text_token_in_any_call(mark: str) -> None:
    """verl, TRL and AReaL may leave it; it would be a second one behind the template's own."""
    reward = prb.reward_fn(lambda comparison: [float(len(text)) for text in comparison.responses])
    info = {"question": QUESTION}
    assert reward(data_source="d", solution_str=f"Tea.{mark}", ground_truth="", extra_info=info) == 4.0
    assert reward(solution_strs=[f"Tea.{mark}"], extra_infos=[info]) == [4.0]
    assert reward(prompts=[QUESTION], completions=[f"Tea.{mark}"]) == [4.0]
    assert reward("<|im_start|>user", f"Tea.{mark}", [1], [2], question=QUESTION) == 4.0
    assert reward(prompts=[QUESTION], completions=[f"Tea.{mark}Or not."]) == [
        float(len(f"Tea.{mark}Or not."))
    ]
