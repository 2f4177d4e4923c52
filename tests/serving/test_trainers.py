"""Each trainer's call of a reward function gives what the model itself gives, whatever scores and wherever it is.

A call is held as the code of the trainer makes it; TRL and tunix also train (`test_reward_fn.py`, `test_engines.py`).
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import httpx
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.personal.few_shot.registry import read_settings
from tests.serving.local_server import serving
from tests.serving.verifiers_trace import task, trace
from tests.study.people import QUICK
from tests.tiny_encoders import WORDS, write_encoder

RENDERED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Rollout:
    """A completion with its prompt and its user."""

    question: str
    completion: str
    user_id: str
    profile: list[dict[str, str]]

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]

    @property
    def columns(self) -> dict[str, Any]:
        return {"user_id": self.user_id, "profile": self.profile}


def _people(count: int = 16) -> list[dict[str, Any]]:
    """People of whom each prefers the responses with a word of its own to those with another one's."""
    rng, favourites = np.random.default_rng(0), ("soup", "rain", "chess", "bread")
    rows = []
    for user in range(count):
        for number in range(6):
            words = [str(word) for word in rng.choice(WORDS[:20], 4)]
            other = [word for word in words if word not in favourites] or ["the"]
            profile = [{"id": "p", "category": "", "text": f"i read {favourites[user % 4]}"}]
            row = {
                "id": f"{user}-{number}",
                "user_id": f"user {user}",
                "question": f"what {WORDS[number % 3]} ?",
            }
            sides = {"chosen": favourites[user % 4], "rejected": favourites[user % 4 - 1]}
            texts = {side: " ".join([word, *other, word]) for side, word in sides.items()}
            rows.append(row | texts | {"profile": profile})
    return rows


PEOPLE = _people()
ROLLOUTS = [
    Rollout(row["question"], row[side], row["user_id"], row["profile"])
    for row in (PEOPLE[3], PEOPLE[9])
    for side in ("chosen", "rejected")
]
TEXTS = {"prompts": [r.question for r in ROLLOUTS], "completions": [r.completion for r in ROLLOUTS]}


@dataclass(frozen=True)
class Kind:
    """Something that scores: the reward function of it, and what it gives by itself."""

    reward: Any
    expected: list[float]


@pytest.fixture(scope="module")
def kinds(model: prb.RewardModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Kind]]:
    folder = tmp_path_factory.mktemp("kinds")
    write_encoder(folder / "bert")
    study: Any = {"methods": ["offset"], "shots": [0, 2], "settings": read_settings(QUICK), "progress": False}
    prb.personalise(PEOPLE, backbone=folder / "bert", out=folder / "study", **study)
    fitted = folder / "study" / "fitted" / "offset"
    history = [prb.Comparison(**row) for row in PEOPLE if int(row["id"][-1]) < 3]
    blind, known = prb.load(fitted), prb.load(fitted)
    known: Any
    for user in {str(row.user_id) for row in history}:
        known.adapt(user, [row for row in history if row.user_id == user])

    def expected(scorer: Any) -> list[float]:
        asked = [
            prb.Comparison(id="1", question=r.question, responses=[r.completion], **r.columns)
            for r in ROLLOUTS
        ]
        return [float(scorer.score(comparison)[0]) for comparison in asked]

    with serving(model, batch_tokens=512) as url, serving(known) as personal:
        yield {
            "single": Kind(prb.reward_fn(model.name, batch_tokens=512), expected(model)),
            "fitted": Kind(prb.reward_fn(fitted), expected(blind)),
            "history": Kind(prb.reward_fn(fitted, history=history), expected(known)),
            "server": Kind(prb.reward_fn(url), expected(model)),
            "served history": Kind(prb.reward_fn(personal), expected(known)),
        }


def _column(name: str) -> list[Any]:
    return [rollout.columns[name] for rollout in ROLLOUTS]


def trl(reward: Any) -> list[float]:
    """TRL 1.16, `GRPOTrainer._calculate_rewards`: conversational prompts, columns, and three things to log with."""
    rewards = reward(
        prompts=[rollout.messages for rollout in ROLLOUTS],
        completions=[[{"role": "assistant", "content": rollout.completion}] for rollout in ROLLOUTS],
        completion_ids=[[1, 2] for _ in ROLLOUTS],
        user_id=_column("user_id"),
        profile=_column("profile"),
        trainer_state=object(),
        log_extra=print,
        log_metric=print,
    )
    assert [type(value) for value in rewards] == [float] * len(ROLLOUTS)
    assert reward.__name__ == "prb_reward"
    return rewards


def tunix(reward: Any, **more: Any) -> list[float]:
    """google-tunix 0.1.7, `SequenceRewardManager._compute_rewards`: columns are arrays, each row repeated for its
    generations; `mode` is one of them; parameters named like its configuration would be filled in."""
    profiles = np.empty(len(ROLLOUTS), object)
    profiles[:] = _column("profile")
    columns = {
        "question": np.array([rollout.question for rollout in ROLLOUTS]),
        "user_id": np.array(_column("user_id")),
        "profile": profiles,
        "mode": "train",
    }
    prompts = list(np.array([RENDERED.format(rollout.question) for rollout in ROLLOUTS]))
    rewards = reward(prompts=prompts, completions=[r.completion for r in ROLLOUTS], **columns, **more)
    assert isinstance(rewards, list)
    return np.array(rewards).tolist()


def maxtext(reward: Any) -> list[float]:
    """MaxText 0.2.5, `train_rl.create_rl_components`: tunix's call of a wrapped function with `tmvp_config`."""

    @wraps(reward)
    def wrapped(**given: Any) -> Any:
        return reward(tmvp_config=object(), **given)

    assert wrapped.__name__ == "prb_reward"
    return tunix(wrapped)


def verl(reward: Any) -> list[float]:
    """verl 0.8.0.dev, `NaiveRewardManager.run_single`: one at a time, behind a partial that is sent to workers.

    The data are parquet: the posts are an array. The manager adds to `extra_info`."""
    call = pickle.loads(pickle.dumps(partial(reward)))

    def one(rollout: Rollout) -> float:
        info = {"question": rollout.question, "user_id": rollout.user_id, "index": 3, "split": "train"}
        info |= {"profile": np.array(rollout.profile, object), "num_turns": 2, "rollout_reward_scores": {}}
        return call(
            data_source="people", solution_str=rollout.completion, ground_truth=None, extra_info=info,
            reward_router_address="127.0.0.1:30000", reward_model_tokenizer=None,
        )  # fmt: skip

    return [one(rollout) for rollout in ROLLOUTS]


def verl_batch(reward: Any) -> list[float]:
    """verl 0.8.0.dev, `BatchRewardManager.verify`: lists, but what was in the batch's table is an array of objects."""
    infos = np.array(
        [{"question": r.question, **r.columns, "rollout_reward_scores": {}} for r in ROLLOUTS], object
    )
    return reward(
        data_sources=np.array(["people"] * len(ROLLOUTS), object),
        solution_strs=[rollout.completion for rollout in ROLLOUTS],
        ground_truths=[None] * len(ROLLOUTS),
        extra_infos=infos,
    )


def areal(reward: Any) -> list[float]:
    """AReaL 1.0.4, `RLVRWorkflow._compute_rewards`: decoded ids with their special tokens, in a process pool."""

    def one(rollout: Rollout) -> float:
        call = partial(
            reward, RENDERED.format(rollout.question), f"{rollout.completion}<|im_end|>", [1, 2], [3],
            messages=rollout.messages, **rollout.columns, query_id="7",
        )  # fmt: skip
        return pickle.loads(pickle.dumps(call))()

    return [one(rollout) for rollout in ROLLOUTS]


def openrlhf(reward: Any) -> list[float]:
    """OpenRLHF 0.11.0, `SingleTurnAgentExecutor`: one at a time; labels are a column of the data, texts as a rule."""

    def one(rollout: Rollout) -> float:
        prompt = RENDERED.format(rollout.question)
        label = json.dumps({"question": rollout.question, **rollout.columns})
        query = f"{prompt}{rollout.completion}<|im_end|>"
        served = getattr(reward, "_model", None)
        if url := getattr(served, "url", None):  # --remote_rm_url URL/get_reward
            body = {"query": [query], "prompts": [prompt], "labels": [label]}
            info = httpx.post(f"{url}/get_reward", json=body).raise_for_status().json()
        else:  # --remote_rm_url FILE.py, whose `reward_func` it is
            info = reward([query], [prompt], [label])
        assert info["rewards"] == info["scores"]
        return info["rewards"][0]

    return [one(rollout) for rollout in ROLLOUTS]


def verifiers(reward: Any) -> list[float]:
    """verifiers 0.4, `Task.score`: the method `score(task, trace)` of a judge, one rollout at a time."""

    def one(rollout: Rollout) -> float:
        said = {"role": "assistant", "content": rollout.completion}
        return reward(task(rollout.question, **rollout.columns), trace([*rollout.messages, said]))

    return [one(rollout) for rollout in ROLLOUTS]


def rubric(reward: Any) -> list[float]:
    """verifiers 0.1.14, `Rubric._call_individual_reward_func`: messages are objects, columns of the data keywords."""

    def one(rollout: Rollout) -> float:
        said = trace([*rollout.messages, {"role": "assistant", "content": rollout.completion}])
        spoken = {"prompt": said.messages[:-1], "completion": said.messages[-1:]}
        return reward(
            **spoken,
            answer="",
            state={"tool_defs": []},
            info={},
            task=None,
            parser=object(),
            **rollout.columns,
        )

    return [one(rollout) for rollout in ROLLOUTS]


def rubric_group(reward: Any) -> list[float]:
    """verifiers 0.1.14, `Rubric._call_group_reward_func`: lists, of which each entry is as in a rubric's other call."""
    said = [trace([*r.messages, {"role": "assistant", "content": r.completion}]).messages for r in ROLLOUTS]
    return reward(
        prompts=[turns[:-1] for turns in said],
        completions=[turns[-1:] for turns in said],
        infos=[rollout.columns for rollout in ROLLOUTS],
        states=[{"tool_defs": []} for _ in ROLLOUTS],
    )


@pytest.mark.parametrize("kind", ["single", "fitted", "history", "server", "served history"])
@pytest.mark.parametrize(
    "trainer", [trl, tunix, maxtext, verl, verl_batch, areal, openrlhf, verifiers, rubric, rubric_group]
)
def test_the_reward_is_the_model_s_score(
    kinds: dict[str, Kind], trainer: Callable[[Any], Sequence[float]], kind: str
) -> None:
    assert list(trainer(kinds[kind].reward)) == pytest.approx(kinds[kind].expected, abs=1e-5)


def test_the_kinds_differ_so_that_the_user_counts(kinds: dict[str, Kind]) -> None:
    assert not np.allclose(kinds["fitted"].expected, kinds["history"].expected, atol=1e-3)
    for name in ("single", "history"):
        bare = kinds[name].reward(**TEXTS, user_id=[None] * len(ROLLOUTS), profile=[[]] * len(ROLLOUTS))
        assert not np.allclose(bare, kinds[name].expected, atol=1e-3)


def test_the_client_of_a_server_goes_to_another_process_and_starts_no_jax(kinds: dict[str, Kind]) -> None:
    given = TEXTS | {name: _column(name) for name in ("user_id", "profile")}
    program = """
import pickle, sys
reward, url, given = pickle.load(sys.stdin.buffer)
import prb_jax as prb
pairs = zip(reward(**given), prb.reward_fn(url)(**given), strict=True)
assert all(abs(one - other) < 1e-5 for one, other in pairs)  # batches differ
print(reward(**given), sorted({"jax", "flax", "torch", "transformers"} & sys.modules.keys()), sep="\\n")
"""
    reward = kinds["server"].reward
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps((reward, reward._model.url, given)), capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    rewards, heavy = done.stdout.decode().splitlines()
    assert json.loads(rewards) == pytest.approx(kinds["server"].expected, abs=1e-5)
    assert heavy == "[]"
