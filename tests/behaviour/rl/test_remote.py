"""A reward behind a server that is slow, wrong or gone: asked again, or one error with the comparison, no default."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.behaviour.rl.rewards import Reward, check_scoring, open_reward
from prb_jax.behaviour.rl.sections import ScoringSettings
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.scoring.remote import score_server as remote
from tests.behaviour.rl.tiny import comparisons

TEXTS = [["a", "bb"], ["ccc", "d"]]
MODEL: dict[str, Any] = {"id": "m", "identity": {"name": "m", "sha256": "1"}, "view": {"profile_posts": 2}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BACKOFF", 0.0)
    monkeypatch.setattr(remote, "TRIES", 3)


def opened(answer: Callable[[dict[str, Any]], httpx.Response], model: Any = MODEL) -> Reward:
    """A reward whose server answers requests for scores with a function of their bodies."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [model]})
        assert request.url.path == "/score"
        return answer(json.loads(request.content))

    client = httpx.Client(transport=httpx.MockTransport(handle))
    return Reward(remote.RemoteScorer("http://there", client), ScoringSettings(), {})


def lengths(body: dict[str, Any]) -> httpx.Response:
    scores = [{"index": k, "score": float(len(text))} for k, text in enumerate(body["documents"])]
    return httpx.Response(200, json={"data": scores})


def score(reward: Reward) -> np.ndarray:
    return reward.score(comparisons(2), TEXTS, step=3).values


def test_a_request_that_fails_for_a_while_is_sent_again() -> None:
    seen: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> httpx.Response:
        seen.append(body)
        if len(seen) == 1:
            raise httpx.ConnectError("refused")
        return httpx.Response(503, headers={"Retry-After": "0"}) if len(seen) == 2 else lengths(body)

    np.testing.assert_array_equal(score(opened(answer)), [[1, 2], [3, 1]])
    assert len(seen) == 4
    first = next(body for body in seen if body["documents"] == TEXTS[0])
    assert first["user_id"] == "ana"
    assert first["queries"] == [[{"role": "user", "content": "Tea?"}]]
    assert first["profile"] == [{"id": "p", "category": "", "text": "yes " * 6}]


def only_the_first(response: httpx.Response) -> Callable[[dict[str, Any]], httpx.Response]:
    return lambda body: lengths(body) if body["documents"] == TEXTS[0] else response


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(500, text="later"), r"no answer after 3 tries; the last one: status 500"),
        (httpx.Response(401, text="who?"), r"status 401: .*set PRB_SERVE_TOKEN"),
        (httpx.Response(400, text="what?"), r"status 400: 'what\?'"),
        (httpx.Response(200, json={"data": [{"score": 1.0}]}), r"expected 2 finite numbers"),
        (httpx.Response(200, text='{"data": [{"score": 1}, {"score": NaN}]}'), r"not valid JSON: NaN"),
        (httpx.Response(200, json=[1, 2]), r"expected an answer of `prb serve`"),
        (httpx.Response(200, text="<html>"), r"http://there: "),
    ],
)
def test_an_answer_without_scores_is_an_error_with_the_comparison(response: Any, message: str) -> None:
    expected = rf"step 3: the reward m failed: .*{message}.*'q1'. Nothing was updated"
    with pytest.raises(prb.RunError, match=expected):
        score(opened(only_the_first(response)))


def test_a_server_that_is_gone_or_serves_another_model() -> None:
    def gone(body: dict[str, Any]) -> httpx.Response:
        raise httpx.ConnectError("refused")

    message = r"no answer after 3 tries; the last one: ConnectError: refused.*'q0'"
    with pytest.raises(prb.RunError, match=message):
        score(opened(gone))
    other = {**MODEL, "identity": dict(MODEL["identity"])}
    reward = opened(lengths, other)
    assert reward.model_identity() == {"sha256": "1"}
    other["identity"]["name"] = "elsewhere"  # the same model under another name
    score(reward)
    other["identity"]["sha256"] = "2"
    with pytest.raises(prb.RunError, match=r"serves another model or another view than before.*'q0'"):
        score(reward)
    with pytest.raises(
        prb.RunError, match=r"expected a description of the served model from `prb serve`, found"
    ):
        opened(lengths, {"id": "vllm"})


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1", r"http://127.0.0.1:1: no answer: ConnectError"),
        ("http://me:word@there", r"without a user and a password"),
        ("http://there:port", r"no URL"),
    ],
)
def test_what_cannot_be_a_server(url: str, message: str) -> None:
    with pytest.raises(prb.RunError, match=message):
        open_reward(PpoSettings(), url)


def test_what_a_reward_is_shown_is_its_own_choice_or_an_option() -> None:
    rewards = [opened(lengths), open_reward(PpoSettings(), "baseline:length")]
    options: dict[str, Any] = {"profile_posts": 3, "protocol": "paper", "max_length": 9, "dtype": "bfloat16"}
    for name, value in {**options, "mesh": "fsdp=1", "history": "FILE"}.items():
        message = rf"'scoring.{name}': not used by m or baseline:length; remove it, found"
        with pytest.raises(prb.RunError, match=message):
            check_scoring(ScoringSettings(**{name: value}), rewards)
