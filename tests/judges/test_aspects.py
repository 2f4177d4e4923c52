"""`prb aspects` and what reads it; judges with hints and controls, and the reports about them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import prb_jax as prb
from prb_jax.errors import DataError, RunError
from prb_jax.judges.aspects import INSTRUCTION
from prb_jax.judges.options import JudgeOptions
from prb_jax.remote.options import EndpointOptions
from prb_jax.scoring.prompt_extras import PromptExtras
from tests.judges.stand_in import stand_in
from tests.tiny_models import write_model_without_torch
from tests.tiny_policies import VOCABULARY, write_policy
from tests.tiny_tokenizer import write_tokenizer

USERS = {"ana": "apples", "bo": "bread", "cy": "cheese"}


def write_data(folder: Path, count: int = 9) -> Path:
    """Pairs whose better response names what the user likes, and the worse one what somebody else likes."""
    rows = []
    for number in range(count):
        user, other = (list(USERS)[(number + k) % 3] for k in (0, 1))
        profile = [{"id": f"p{user}", "category": "", "text": f"I love {USERS[user]}."}]
        rows.append(
            {
                "id": f"c{number}",
                "user_id": user,
                "question": f"Question {number}?",
                "chosen": f"{USERS[user]} for you, number {number}",
                "rejected": f"{USERS[other]} for you, number {number}",
                "profile": profile,
                "rubric_aspects": [{"aspect": f"names {USERS[user]}"}],
            }
        )
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reader(text: str, _: int) -> str:
    """Plans what is in the profile; rates what the prompt says of the user, and cannot know it without."""
    told = text.partition("What the user asks now:")[0] if "What the user asks now:" in text else ""
    liked = [food for food in USERS.values() if food in told]
    if INSTRUCTION in text:
        return "".join(f"- {food}\n" for food in liked)
    answer = text.partition("Answer:\n")[2].split("\n\n")[0]
    return "9" if any(answer.startswith(food) for food in liked) else "1"


def test_a_planner_a_judge_its_controls_and_the_reports(tmp_path: Path) -> None:
    data, out = write_data(tmp_path), tmp_path / "runs"

    def prb_run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "prb_jax", *words],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with stand_in(reader) as server:
        endpoint = EndpointOptions(url=server.url, model="m", backoff=0.01)
        at = ("--endpoint", server.url, "--model", "m", "--data", str(data), "--no-progress")
        assert "texts: 9, of these without a word: 0" in prb_run("aspects", *at, "--out", "plans")
        assert len(server.asked) == 9
        assert all("for you" not in body["messages"][0]["content"] for _, body in server.asked)
        again = prb.plan_aspects(None, str(data), out=tmp_path / "plans", endpoint=endpoint, progress=False)
        assert (len(server.asked), again.summary["n"]) == (9, 9)
        plans = f"planned:{tmp_path / 'plans'}"

        def judged(name: str, **options: Any) -> dict[str, Any]:
            chosen = JudgeOptions(protocol="score", **options)
            return prb.judge(
                None, str(data), out=out / name, options=chosen, endpoint=endpoint, progress=False
            ).summary

        words = ("--protocol", "score", "--controls", "all", "--aspects", plans, "--profile-posts", "0")
        shown = prb_run("judge", *at, *words, "--out", str(out / "planned"))
        assert "was told beside the profile: planned aspects" in " ".join(shown.split())
        planned = json.loads((out / "planned" / "summary.json").read_text())
        bare = judged("bare", profile_posts=0)
        oracle = judged("oracle", profile_posts=0, hints=PromptExtras(aspects="oracle"))
        with pytest.raises(RunError, match="the model is shown nothing of a user"):
            judged("nothing", profile_posts=0, controls="blind")
    assert (planned["accuracy"], bare["accuracy"], oracle["accuracy"]) == (1.0, 0.0, 1.0)
    blind, swap = planned["controls"]["blind"], planned["controls"]["swap"]
    assert (blind["accuracy"], blind["difference"], blind["shown_otherwise"]) == (0.0, 1.0, 9)
    assert (swap["accuracy"] < 1, swap["difference"]) == (True, 1.0 - swap["accuracy"])
    assert planned["controls"].keys() == {"blind", "swap"}
    below = json.loads((out / "planned" / "controls" / "swap" / "summary.json").read_text())
    assert below["judge"]["n"] == 9
    assert planned["hints"]["aspects"]["planner"] == "m"

    (pair,) = prb.compare(out / "planned", out / "bare", out=tmp_path / "compared")["pairs"]
    assert abs(pair["difference"]) == 1.0
    page = prb.report([out / "planned", out / "oracle"], out=tmp_path / "page.html")
    text = Path(page).read_text() if isinstance(page, str | Path) else (tmp_path / "page.html").read_text()
    assert "oracle aspects, an upper bound" in text
    assert [entry["run"] for entry in prb.leaderboard(out)] == ["planned", "bare"]
    every = {entry["run"]: entry["hints"] for entry in prb.leaderboard(out, upper_bounds=True)}
    assert every == {"planned": "planned aspects", "bare": "", "oracle": "oracle aspects, an upper bound"}
    with pytest.raises(RunError, match="oracle: was told oracle aspects, an upper bound"):
        prb.correlate([out / "bare", out / "oracle"], [], out=tmp_path / "correlated")


def test_a_planner_on_this_machine_and_a_reward_model_that_reads_it(tmp_path: Path) -> None:
    data = write_data(tmp_path, 4)
    write_policy(tmp_path / "policy", "qwen3", eos=3, num_hidden_layers=1)
    write_model_without_torch(tmp_path / "rm", "qwen3", vocab_size=VOCABULARY, num_hidden_layers=1)
    write_tokenizer(tmp_path / "rm")
    plans = tmp_path / "plans"
    planned = prb.plan_aspects(
        tmp_path / "policy", str(data), out=plans, profile_posts=1, max_new_tokens=4, progress=False
    )
    rows = [json.loads(line) for line in (plans / "aspects.jsonl").read_text().splitlines()]
    asked = [
        f"What this user wrote before:\n\nPost 1:\nI love {USERS[list(USERS)[n % 3]]}.\n\nWhat the user asks now:\n\n"
        f"Question {n}?\n\n{INSTRUCTION}"
        for n in range(4)
    ]
    texts = prb.load_policy(tmp_path / "policy").sample(asked, temperature=0.0, max_new_tokens=4)
    assert [row["text"] for row in rows] == [sample.text.strip() for (sample,) in texts]
    (plans / "aspects.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]) + '{"id"')
    prb.plan_aspects(
        tmp_path / "policy", str(data), out=plans, profile_posts=1, max_new_tokens=4, progress=False
    )
    assert [json.loads(line) for line in (plans / "aspects.jsonl").read_text().splitlines()] == rows
    assert planned.summary["n"] == 4
    told = prb.evaluate(
        str(tmp_path / "rm"), str(data), out=tmp_path / "told", aspects=f"planned:{plans}", progress=False
    )
    plain = prb.load(str(tmp_path / "rm"))
    by_hand = []
    for row, line in zip(rows, data.read_text().splitlines(), strict=True):
        one = json.loads(line)
        said = (
            f"What this user wants from an answer to this question:\n\n{row['text']}\n\n"
            if row["text"]
            else ""
        )
        one["question"] = (
            f"What this user wrote before:\n\nPost 1:\n{one['profile'][0]['text']}\n\n{said}What the user asks now:\n\n"
            f"{one['question']}"
        )
        by_hand.append(prb.Comparison.from_row(one | {"profile": None}, where="by hand"))
    expected = plain.score(by_hand)
    for row, scores in zip(told.rows, expected, strict=True):
        assert list(row.scores) == pytest.approx(list(scores), abs=1e-5)
    assert told.summary["controls"]["blind"]["shown_otherwise"] == 4
    with pytest.raises(RunError, match="aspects: baseline:length reads no prompt"):
        prb.evaluate("baseline:length", str(data), aspects="oracle", progress=False)
    with pytest.raises(DataError, match=r"comparison 'c0'.*without any post"):
        prb.plan_aspects(
            tmp_path / "policy",
            str(data),
            out=tmp_path / "long",
            max_new_tokens=prb.load_policy(tmp_path / "policy").context - 5,
            progress=False,
        )
