"""`prb evaluate URL`: the scores of a server are those of the model itself, and the run says what it cannot know."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.rl.rewards import check_scoring, open_reward
from prb_jax.behaviour.rl.sections import ScoringSettings
from prb_jax.behaviour.rl.settings import PpoSettings
from tests.json_lines import read_lines, write_lines
from tests.scoring.records import record
from tests.serving.local_server import serving

DATA = [replace(record(number, 3), labels=(1.0, 0.0, 0.5), user_id=f"u{number % 3}") for number in range(6)]
ROWS = [
    {
        "id": one.id,
        "prompt": [message.as_dict() for message in one.prompt],
        "responses": list(one.responses),
        "labels": [1.0, 0.0, 0.5],
        "user_id": one.user_id,
        "profile": [asdict(post) for post in one.profile],
    }
    for one in DATA
]


@pytest.fixture(scope="module")
def url(model: prb.RewardModel) -> Iterator[str]:
    with serving(model, batch_tokens=512, view=prb.ViewOptions(profile_posts=1)) as address:
        yield address


def test_a_prb_server_is_evaluated_with_its_own_view(
    model: prb.RewardModel, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_lines(tmp_path / "data.jsonl", ROWS)
    assert cli.main(["evaluate", url, "--data", data, "--out", str(tmp_path / "run"), "--no-progress"]) == 0
    assert "the versions of the libraries that compute there are not known" in capsys.readouterr().err
    rows = read_lines(tmp_path / "run" / "scores.jsonl")
    np.testing.assert_allclose([row["scores"] for row in rows], model.score(DATA, profile_posts=1), atol=1e-5)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["inputs"]["profile_posts"], run["inputs"]["protocol"]) == (1, "default")
    assert "jax" not in run["inputs"]["versions"]
    assert "not known" in run["remarks"][0]
    for options, message in (
        ({"profile_posts": 3}, "profile_posts: decided by the server"),
        ({"dtype": "float32"}, "dtype: decided by the server"),
        ({"batch_tokens": 99}, "batch_tokens: decided by the server"),
    ):
        with pytest.raises(prb.RunError, match=message):
            prb.evaluate(url, DATA, progress=False, **cast(Any, options))


class _Classifier(BaseHTTPRequestHandler):
    """Answers as vLLM 0.11 and SGLang 0.5 do: the score of a conversation is the model's own."""

    def do_GET(self) -> None:
        server = cast(Any, self.server)
        facts: dict[str, Any] = {"/v1/models": {"data": [{"id": name, "root": "R"} for name in server.names]}}
        about = ("/get_model_info", "model_path") if server.sglang else ("/version", "version")
        facts |= {about[0]: {about[1]: "0.11"}}
        self._answer(facts.get(self.path))

    def do_POST(self) -> None:
        server = cast(Any, self.server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "messages" in body:
            ids = server.model.tokenizer.encode([prb.Message(**message) for message in body["messages"]])
        else:
            ids = body["input_ids"] if server.sglang else body["input"]
        assert server.sglang or body["use_activation"] is False
        number = server.by_ids[tuple(ids)]
        numbers = [number] * server.classes
        if server.sglang:
            self._answer([{"embedding": numbers, "meta_info": {}}])
        else:
            self._answer({"data": [{"index": 0, "data" if self.path == "/pooling" else "probs": numbers}]})

    def _answer(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def classifier(model: prb.RewardModel) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Classifier)
    server.model, server.sglang, server.names, server.classes, server.by_ids = model, False, ["m"], 1, {}
    trees = model.encode(DATA, profile_posts=2)
    for tree, scores in zip(trees, model.score(DATA, profile_posts=2), strict=True):
        server.by_ids |= {tuple(tree.sequence(k).tolist()): float(scores[k]) for k in range(3)}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield server
    server.shutdown()


@pytest.mark.parametrize(("route", "rendered", "sglang"), [
    ("/classify", False, False), ("/pooling", False, False), ("/classify", True, False), ("/classify", True, True),
])  # fmt: skip
def test_vllm_and_sglang_are_asked_for_whole_conversations(
    classifier: Any, model: prb.RewardModel, route: str, rendered: bool, sglang: bool, tmp_path: Path
) -> None:
    classifier.sglang = sglang
    options: dict[str, Any] = {"tokenizer": model.name} if rendered else {}
    options |= {"profile_posts": 2, "out": tmp_path / "run", "progress": False}
    rows = prb.evaluate(classifier.url + route, DATA, **options).rows
    np.testing.assert_allclose([row.scores for row in rows], model.score(DATA, profile_posts=2), atol=1e-5)
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["inputs"]["model"]
    assert (recorded["model"], recorded["route"], "dtype" in recorded["unknown"]) == ("m", route, True)
    assert ("chat template" in recorded["unknown"], "template_sha256" in recorded) == (not rendered, rendered)


def test_such_a_server_is_a_reward_of_trainers_too(classifier: Any, model: prb.RewardModel) -> None:
    reward = prb.reward_fn(f"{classifier.url}/classify", profile_posts=2)
    for one in DATA[:3]:
        messages = [message.as_dict() for message in one.prompt]
        columns = {"user_id": [one.user_id] * 3, "profile": [[asdict(post) for post in one.profile]] * 3}
        columns |= {"prompts": [messages] * 3, "completions": list(one.responses)}
        rewards = pickle.loads(pickle.dumps(reward))(**columns)
        assert rewards == pytest.approx(model.score(one, profile_posts=2).tolist(), abs=1e-5)


@pytest.mark.parametrize("sglang", [False, True])
def test_such_a_server_is_the_reward_of_a_policy(
    classifier: Any, model: prb.RewardModel, sglang: bool
) -> None:
    classifier.sglang = sglang
    scoring = ScoringSettings(profile_posts=2, tokenizer=str(model.name) if sglang else None)
    reward = open_reward(PpoSettings(scoring=scoring), f"{classifier.url}/classify")
    check_scoring(scoring, [reward])
    rewards = reward.score(DATA, [one.responses for one in DATA], step=1).values
    np.testing.assert_allclose(rewards, np.stack(model.score(DATA, profile_posts=2)), atol=1e-5)
    assert reward.identity()["route"] == "/classify"
    with pytest.raises(prb.RunError, match=r"'scoring.max_length': not used by m"):
        check_scoring(ScoringSettings(max_length=9), [reward])
    if sglang:
        with pytest.raises(prb.RunError, match=r"give --tokenizer NAME \(of prb ppo scoring"):
            open_reward(PpoSettings(), f"{classifier.url}/classify")


def test_what_no_score_can_come_from_is_one_error(classifier: Any, model: prb.RewardModel) -> None:
    url = f"{classifier.url}/classify"

    def refused(message: str, place: str = url, **options: Any) -> None:
        with pytest.raises(prb.RunError, match=message):
            prb.evaluate(place, DATA, profile_posts=2, progress=False, **options)

    refused("max_length: decided by the server", max_length=99)
    refused("dtype: decided by the server", dtype="float32")
    refused("revision, chat_template: require --tokenizer", revision="r")
    classifier.classes = 2
    refused("expected one finite number, the score of a classifier with one label")
    classifier.classes, classifier.names = 1, ["m", "n"]
    refused("expected #MODEL after the address, one of m, n")
    assert prb.evaluate(f"{url}#n", DATA, profile_posts=2, progress=False).summary["n"] == 6
    classifier.sglang = True
    refused("SGLang classifies token ids, not messages: give --tokenizer NAME")
