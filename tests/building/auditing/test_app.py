"""Many annotators at once, links and invitations: the application without a network."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

import prb_jax as prb
from tests.building.auditing.pairs import answer, good_side, write_pairs
from tests.json_lines import read_lines


@pytest.fixture
def audit_app(tmp_path, monkeypatch, capsys):
    """Serve an audit as `prb.audit` does, with a function of clients in the place of the network; what was printed."""

    def run(work: Callable[[Any], Coroutine[Any, Any, None]], **options: Any) -> list[str]:
        def run_app(app, listening, *, limits, ready):
            ready()
            asyncio.run(work(app))

        monkeypatch.setattr("prb_jax.serving.connections.run_app", run_app)
        prb.audit(tmp_path / "a", port=0, **options)
        return capsys.readouterr().out.splitlines()

    return run


def client_of(app: Any, token: str = "") -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)


def test_twenty_annotators_at_once_judge_every_item_as_often_as_planned(audit_app, tmp_path):
    async def judge(app: Any, name: str) -> None:
        async with client_of(app) as client:
            joined = await client.post("/api/join", json={"name": name})
            client.headers["Authorization"] = f"Bearer {joined.json()['token']}"
            shown = (await client.post("/api/task", json={})).json()
            while shown["task"] is not None:
                sent = {"task": shown["task"], "answer": answer(good_side(shown["item"]), comment=name)}
                assert (await client.post("/api/draft", json=sent)).json() == {"kept": True}
                shown = (await client.post("/api/submit", json=sent)).json()

    async def work(app: Any) -> None:
        await asyncio.gather(*(judge(app, f"annotator {number}") for number in range(20)))

    data = write_pairs(tmp_path / "pairs.jsonl", 15)
    audit_app(work, data=data, per_item=4, check_every=0)
    assert prb.audit_export(tmp_path / "a", out=tmp_path / "out.jsonl") == 60
    rows = read_lines(tmp_path / "out.jsonl")
    assert set(Counter(row["id"] for row in rows).values()) == {4}
    assert len({(row["id"], row["annotator"]) for row in rows}) == 60
    assert all(row["comment"] == row["annotator"] and row["fit"] == "chosen" for row in rows)


def test_links_and_invitations(audit_app, tmp_path):
    data = write_pairs(tmp_path / "pairs.jsonl", 3)
    statuses: dict[str, int] = {}

    async def strangers(app: Any) -> None:
        async with client_of(app) as client:
            kind = {"Content-Type": "application/json"}
            told = {"none": {}, "right": {"invitation": "s\u00e9cret"}}
            told |= {"wrong": {"invitation": "x"}, "odd": {"invitation": "\ud800"}}
            for name, invitation in told.items():
                body = json.dumps({"name": "ana", **invitation}).encode()
                statuses[name] = (await client.post("/api/join", content=body, headers=kind)).status_code

    lines = audit_app(strangers, data=data, invitation="s\u00e9cret", host="0.0.0.0")
    assert lines[1].endswith("/#invitation=s%C3%A9cret")
    assert statuses == {"none": 401, "wrong": 401, "odd": 401, "right": 200}

    lines = audit_app(lambda app: asyncio.sleep(0), annotators=["ana", "ben"])
    tokens = {line.split(": ")[0]: line.rsplit("#token=", 1)[1] for line in lines[1:]}
    assert list(tokens) == ["ana", "ben"]

    async def only_ben(app: Any) -> None:
        for name, token in tokens.items():
            async with client_of(app, token) as client:
                statuses[name] = (await client.post("/api/task", json={})).status_code
                by_name = await client.post("/api/join", json={"name": name})
                statuses[f"{name} by name"] = by_name.status_code

    again = audit_app(only_ben, annotators=["ben"])
    assert again[1].endswith(tokens["ben"])  # a link stays the same
    assert (statuses["ben"], statuses["ana"], statuses["ben by name"]) == (200, 403, 403)
    assert (tmp_path / "a" / "secret").stat().st_mode & 0o077 == 0
