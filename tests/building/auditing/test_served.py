"""`prb audit` as a process: annotators at once, a kill between two judgements, strangers, and the page in a browser."""

import contextlib
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import prb_jax as prb
from prb_jax import cli
from tests.building.auditing.pairs import answer, good_side, write_pairs
from tests.json_lines import read_lines
from tests.reports.browser import BROWSER, Page, open_page


@dataclass
class Served:
    """A running audit."""

    process: subprocess.Popen[str]
    url: str

    @contextlib.contextmanager
    def client(self, name: str) -> Iterator[httpx.Client]:
        """A client of an annotator."""
        with httpx.Client(base_url=self.url, timeout=300) as client:
            token = client.post("/api/join", json={"name": name}).json()["token"]
            client.headers["Authorization"] = f"Bearer {token}"
            yield client

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def serve(folder: Path, *arguments: object) -> Served:
    command = [sys.executable, "-m", "prb_jax", "audit", str(folder), "--port", "0", *map(str, arguments)]
    with (folder.parent / "log.txt").open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"auditing {folder} at http://"), (folder.parent / "log.txt").read_text()
    return Served(process, line.rsplit(" ", 1)[1].strip())


def ask(client: httpx.Client, path: str, body: Any = None) -> dict[str, Any]:
    answered = client.post(f"/api/{path}", json=body or {})
    assert answered.status_code == 200, answered.text
    return answered.json()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def served(folder) -> Iterator[list[Served]]:
    """The audit of this file; a test that kills the server puts the next one in its place."""
    data = write_pairs(folder / "pairs.jsonl", 8)
    running = [serve(folder / "audit", "--data", data, "--per-item", "2", "--check-every", "0")]
    yield running
    running[0].kill()


def test_two_annotators_at_once_and_a_kill_between_two_judgements(served, folder):
    def judge(name: str) -> list[str]:
        with served[0].client(name) as client:
            seen = []
            shown = ask(client, "task")
            for _number in range(4):
                seen.append(shown["item"]["prompt"][0]["content"])
                sent = answer(good_side(shown["item"]))
                shown = ask(client, "submit", {"task": shown["task"], "answer": sent})
            draft = answer("a", comment="half") | {"fit": None}
            ask(client, "draft", {"task": shown["task"], "answer": draft})
            return [*seen, shown["item"]["prompt"][0]["content"]]

    with ThreadPoolExecutor(2) as pool:
        before = dict(zip(("ana", "ben"), pool.map(judge, ("ana", "ben")), strict=True))
    served[0].kill()
    served[0] = serve(folder / "audit")  # what is audited is known
    for name, seen in before.items():
        assert len(set(seen)) == 5
        with served[0].client(name) as client:
            shown = ask(client, "task")
            assert (shown["done"], shown["draft"]["comment"], shown["draft"]["fit"]) == (4, "half", None)
            assert shown["item"]["prompt"][0]["content"] == seen[-1]
            # an answer that was lost on its way is sent again, and counts once
            sent = {"task": shown["task"], "answer": answer(good_side(shown["item"]))}
            assert ask(client, "submit", sent)["done"] == 5
            assert ask(client, "submit", sent)["done"] == 5
    report = prb.audit_report(folder / "audit")
    assert (report["judgements"], report["fit"]["label"]["value"]) == (10, 1.0)


def test_another_process_and_other_data_are_refused_in_one_line(served, folder, capsys):
    audit, before = str(folder / "audit"), (folder / "audit" / "audit.db").read_bytes()
    other = write_pairs(folder / "other.jsonl", 3)
    assert cli.main(["audit", audit]) == 2
    assert "another process serves this audit" in capsys.readouterr().err
    copy = shutil.copytree(audit, folder / "copy")
    for arguments, message in (
        (["--data", str(other)], "the data are not those of this audit, or changed since it began"),
        (["--per-item", "5"], "the settings differ from those of this audit (per_item: 2 -> 5)"),
        (["--margin", "9"], "margin: expected a number of points above 0 and below 4, found 9"),
        (["--host", "0.0.0.0"], "other machines could reach the page"),
    ):
        assert cli.main(["audit", str(copy), *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
    assert (folder / "audit" / "audit.db").read_bytes() == before


def test_strangers_are_refused(served):
    with served[0].client("ana") as client:
        token = client.headers["Authorization"]
        shown = ask(client, "task")
        sent = {"task": shown["task"], "answer": answer("a")}
        for headers, status in (
            ({"Authorization": ""}, 401),
            ({"Authorization": token[:-1] + ("0" if token[-1] != "0" else "1")}, 401),
            ({"Authorization": "Bearer 9.x"}, 401),
            ({"Authorization": "Bearer " + "\u00e9"}, 401),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
            ({"Content-Type": "text/plain"}, 415),
            ({"Host": "evil.example"}, 421),
            ({"Host": "[127.0.0.1"}, 421),
            ({"Origin": "http://[127.0.0.1"}, 403),
        ):
            coded = {
                name: value.encode()
                for name, value in ({"Content-Type": "application/json"} | headers).items()
            }
            refused = client.post("/api/submit", content=json.dumps(sent), headers=coded)
            assert refused.status_code == status, (headers, refused.text)
            assert "default-src 'none'" in refused.headers["Content-Security-Policy"]
        for body, status, message in (
            ({"task": shown["task"] + 1}, 409, "no longer open"),
            ({"task": "1 OR 1=1"}, 409, "no longer open"),
            ({"answer": {"fit": "a"}}, 400, "'answer.quality.correctness.a': expected one of 1, 2"),
            ({"answer": answer("a", correctness_a=6)}, 400, "found 6"),
            ({"answer": answer("c")}, 400, "field 'answer.fit': expected one of a, b, unknown"),
            ({"answer": answer("a", comment="x" * 4001)}, 400, "4,001 characters"),
            ({"answer": answer("a", comment="x" * 200_000)}, 413, "at most 100,000 bytes"),
        ):
            refused = client.post("/api/submit", json=sent | body)
            assert (refused.status_code, message in refused.text) == (status, True), refused.text
        with served[0].client("ben") as other:
            assert other.post("/api/submit", json=sent).status_code == 409
        for path in ("/../secret", "/%2e%2e/secret", "/audit.db", "/..%2faudit.json", "/page.js/../secret"):
            assert client.get(path).status_code == 404
        assert client.get("/api/submit").status_code == 405
        assert ask(client, "task")["task"] == shown["task"]
        for name in ("", " ", "x" * 61, "a\nb\x00", 7):
            assert client.post("/api/join", json={"name": name}).status_code == 400


def wait_for(page: Page, condition: str) -> None:
    script = f"""new Promise((done, fail) => {{ const end = Date.now() + 30000; const look = () => {{
      if ({condition}) done(true); else if (Date.now() > end) done(false); else setTimeout(look, 20); }}; look(); }})"""
    assert page.evaluate(script), page.evaluate("document.body.innerText")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_in_a_browser_by_keys_alone(served, folder):
    """On a phone's width, in the dark: join, judge, comment, take back, while the server is killed in between."""
    with open_page(served[0].url, dark=True, width=360, profile=folder / "browser") as page:
        wait_for(page, "document.activeElement.id === 'name'")
        for letter in "cleo":
            page.key(letter)
        page.key("Enter")
        wait_for(page, "document.activeElement.id === 'item-head'")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
        text = page.evaluate("document.getElementById('prompt').textContent")
        assert "<script>document.title = 'broken'</script>" in text
        assert "**Markdown**" in text
        assert "\u202e" in text
        assert r"\x1b[31m" in text
        assert page.evaluate("document.querySelectorAll('#task script, #task img, #task a').length") == 0
        assert page.evaluate("document.getElementById('personal').hidden") is True
        good = page.evaluate("document.getElementById('text-a').textContent.startsWith('good')")
        for key in "5432":
            page.key(key)
        page.key("k"), page.key("1"), page.key("4"), page.key("0")
        wait_for(page, "!document.getElementById('personal').hidden")
        assert page.evaluate("document.activeElement.name") == "fit-choice"
        assert "<script>" in page.evaluate("document.getElementById('person').textContent")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        nameless = (
            "[...document.querySelectorAll('#task input, #task textarea, button, [role=region], section')]"
        )
        nameless += ".filter((e) => e.checkVisibility())"
        nameless += ".filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel)).length"
        assert page.evaluate(nameless) == 0
        assert page.evaluate("[...document.querySelectorAll('fieldset legend')].map((e) => e.textContent)")[:2] == [
            "Correctness of A", "Correctness of B",
        ]  # fmt: skip
        page.key("a" if good else "b")
        page.key("c")
        for letter in "1a?":
            page.key(letter)
        wait_for(page, "document.getElementById('status').textContent === 'Kept.'")
        served[0].kill()
        page.key("j")
        page.key("Enter", modifiers=2)
        status = "document.getElementById('status').textContent"
        wait_for(page, f"{status}.startsWith('The server does not answer')")
        port = served[0].url.rsplit(":", 1)[1]
        served[0] = serve(folder / "audit", "--port", port)
        wait_for(page, "document.getElementById('progress').textContent.startsWith('1 judged')")
        page.key("u")
        wait_for(page, "document.getElementById('comment').value === '1a?j'")
        assert page.evaluate("[...document.querySelectorAll('input:checked')].map((e) => e.value)") == [
            "5", "4", "3", "1", "4", "unknown", "a" if good else "b",
        ]  # fmt: skip
        page.key("Enter")
        wait_for(page, "document.getElementById('progress').textContent.startsWith('1 judged')")
        page.key("Enter")
        wait_for(page, f"{status} === 'Correctness of A: not answered yet.'")
        assert page.evaluate("document.title") == "audit: audit"
        assert all("ERR_CONNECTION_REFUSED" in text for text in page.complaints)
        assert {url.rsplit(":", 1)[0] for url in page.requests} <= {"http://127.0.0.1", "data"}


def test_sigterm_ends_it_and_the_report_and_export_say_what_was_judged(served, folder, capsys):
    """After the tests above: the last one ends the server."""
    log = (folder / "log.txt").read_text()
    assert "good" not in log
    assert "cleo" not in log
    served[0].process.terminate()
    assert served[0].process.wait(300) == 0
    audit = folder / "audit"
    assert not (audit / "audit.db-wal").exists()
    assert cli.main(["audit", str(audit), "--report"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("For a paper\n")  # the answer comes before the tables
    report = json.loads((audit / "report.json").read_text())
    judgements = {annotator["name"]: annotator["judgements"] for annotator in report["annotators"]}
    assert judgements == {"ana": 5, "ben": 5} | ({"cleo": 1} if BROWSER else {})
    assert report["taken_back"] == bool(BROWSER)
    out = folder / "judgements.jsonl"
    assert cli.main(["audit", str(audit), "--export", str(out)]) == 0
    rows = read_lines(out)
    assert len(rows) == report["judgements"]
    assert all(row["fit"] == "chosen" for row in rows)
    if BROWSER:
        assert rows[-1]["comment"] == "1a?j"
        a, b = ("chosen", "rejected") if rows[-1]["a"] == "chosen" else ("rejected", "chosen")
        assert rows[-1]["quality"]["correctness"][a] == 5
        assert rows[-1]["quality"]["helpfulness"] == {a: 4, b: None}
    with pytest.raises(SystemExit):
        cli.main(["audit", str(audit), "--report", "--seed", "3"])
    assert "--seed: has no effect with --report" in capsys.readouterr().err
    with sqlite3.connect(audit / "audit.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
