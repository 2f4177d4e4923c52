"""`prb aspects` and what reads it; judges with hints and controls, and the reports about them."""

import json
from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.judges.aspects import INSTRUCTION
from prb_jax.errors import DataError, RunError
from prb_jax.scoring.prompt_extras import PromptExtras
from tests.behaviour.judges.stand_in import judged, shown_answer, stand_in
from tests.json_lines import read_lines, write_lines
from tests.scoring.records import write_model
from tests.tiny_policies import write_policy

USERS = {"ana": "apples", "bo": "bread", "cy": "cheese"}


def write_data(folder: Path, count: int = 9) -> str:
    """Pairs whose better response names what the user likes, and the worse one what somebody else likes."""
    users, foods = list(USERS), list(USERS.values())
    rows = [
        {
            "id": f"c{number}",
            "user_id": users[number % 3],
            "question": f"Question {number}?",
            "chosen": f"{foods[number % 3]} for you, number {number}",
            "rejected": f"{foods[(number + 1) % 3]} for you, number {number}",
            "profile": [{"id": "p", "category": "", "text": f"I love {foods[number % 3]}."}],
            "rubric_aspects": [{"aspect": f"names {foods[number % 3]}"}],
        }
        for number in range(count)
    ]
    return write_lines(folder / "data.jsonl", rows)


def reader(text: str, _: int) -> str:
    """Plans what is in the profile; rates what the prompt says of the user, and cannot know it without."""
    told = text.partition("What the user asks now:")[0] if "What the user asks now:" in text else ""
    liked = [food for food in USERS.values() if food in told]
    if INSTRUCTION in text:
        return "".join(f"- {food}\n" for food in liked)
    answer = shown_answer(text)
    return "9" if any(answer.startswith(food) for food in liked) else "1"


def test_a_planner_a_judge_its_controls_and_the_reports(tmp_path, capsys):
    data, out, plans = write_data(tmp_path), tmp_path / "runs", tmp_path / "plans"
    with stand_in(reader) as server:
        endpoint = prb.EndpointOptions(url=server.url, model="m", backoff=0.01)
        at = ("--endpoint", server.url, "--model", "m", "--data", data, "--no-progress")
        assert cli.main(["aspects", *at, "--out", str(plans)]) == 0
        assert "texts: 9, of these without a word: 0" in capsys.readouterr().out
        assert len(server.asked) == 9
        assert all("for you" not in body["messages"][0]["content"] for _, body in server.asked)
        again = prb.plan_aspects(None, data, out=plans, endpoint=endpoint, progress=False)
        assert (len(server.asked), again.summary["n"]) == (9, 9)
        words = ("--protocol", "score", "--controls", "all", "--aspects", f"planned:{plans}")
        run = ("judge", *at, *words, "--profile-posts", "0", "--out", str(out / "planned"))
        assert cli.main(list(run)) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "was told, in addition to the profile: planned aspects" in shown
        planned = json.loads((out / "planned" / "summary.json").read_text())
        of_score = {"protocol": "score", "profile_posts": 0}
        bare = judged(server, data, out / "bare", **of_score).summary
        told = {**of_score, "hints": PromptExtras(aspects="oracle")}
        oracle = judged(server, data, out / "oracle", **told).summary
        with pytest.raises(RunError, match="the model sees no user information"):
            judged(server, data, out / "nothing", **of_score, controls="blind")
    assert (planned["accuracy"], bare["accuracy"], oracle["accuracy"]) == (1.0, 0.0, 1.0)
    blind, swap = planned["controls"]["blind"], planned["controls"]["swap"]
    assert (blind["accuracy"], blind["difference"], blind["shown_otherwise"]) == (0.0, 1.0, 9)
    assert (swap["accuracy"] < 1, swap["difference"]) == (True, 1.0 - swap["accuracy"])
    assert planned["controls"].keys() == {"blind", "swap"}
    below = json.loads((out / "planned" / "controls" / "swap" / "summary.json").read_text())
    assert below["judge"]["n"] == 9
    assert planned["hints"]["aspects"]["planner"] == "m"

    (pair,) = prb.compare(out / "planned", out / "bare", out=tmp_path / "compared")["pairs"]
    assert abs(pair["difference"]) == 0.5  # the bare judge ties everywhere, which counts half
    prb.report([out / "planned", out / "oracle"], out=tmp_path / "page.html")
    assert "oracle aspects, an upper bound" in (tmp_path / "page.html").read_text()
    assert [entry["run"] for entry in prb.leaderboard(out)] == ["planned", "bare"]
    every = {entry["run"]: entry["hints"] for entry in prb.leaderboard(out, upper_bounds=True)}
    assert every == {"planned": "planned aspects", "bare": "", "oracle": "oracle aspects, an upper bound"}
    with pytest.raises(RunError, match="oracle: was told oracle aspects, an upper bound"):
        prb.correlate([out / "bare", out / "oracle"], [], out=tmp_path / "correlated")


def test_a_planner_on_this_machine_and_a_reward_model_that_reads_it(tmp_path):
    data, policy, plans, model = (
        write_data(tmp_path, 4),
        tmp_path / "policy",
        tmp_path / "plans",
        str(tmp_path / "rm"),
    )
    write_policy(policy, "qwen3", eos=3, num_hidden_layers=1)
    write_model(tmp_path / "rm", "qwen3", num_hidden_layers=1)

    def plan() -> list[dict[str, str]]:
        planned = prb.plan_aspects(policy, data, out=plans, profile_posts=1, max_new_tokens=4, progress=False)
        assert planned.summary["n"] == 4
        return read_lines(plans / "aspects.jsonl")

    rows, opened = plan(), prb.load_policy(policy)
    asked = [
        f"What this user wrote before:\n\nPost 1:\nI love {USERS[list(USERS)[n % 3]]}.\n\nWhat the user asks now:\n\n"
        f"Question {n}?\n\n{INSTRUCTION}"
        for n in range(4)
    ]
    texts = opened.sample(asked, temperature=0.0, max_new_tokens=4)
    assert [row["text"] for row in rows] == [sample.text.strip() for (sample,) in texts]
    (plans / "summary.json").unlink()  # as if it had been killed
    write_lines(plans / "aspects.jsonl", rows[:2])
    with (plans / "aspects.jsonl").open("a") as file:
        file.write('{"id"')
    assert plan() == rows
    told = prb.evaluate(model, data, out=tmp_path / "told", aspects=f"planned:{plans}", progress=False)
    by_hand = []
    for row, record in zip(rows, read_lines(Path(data)), strict=True):
        wants = "What this user wants from an answer to this question:"
        said = f"{wants}\n\n{row['text']}\n\n" if row["text"] else ""
        posts = f"What this user wrote before:\n\nPost 1:\n{record['profile'][0]['text']}"
        question = f"{posts}\n\n{said}What the user asks now:\n\n{record['question']}"
        told_by_hand = record | {"profile": None, "question": question}
        by_hand.append(prb.Comparison.from_row(told_by_hand, where="by hand"))
    for row, scores in zip(told.rows, prb.load(model).score(by_hand), strict=True):
        assert list(row.scores) == pytest.approx(list(scores), abs=1e-5)
    assert told.summary["controls"]["blind"]["shown_otherwise"] == 4
    with pytest.raises(RunError, match="aspects: baseline:length has no prompt"):
        prb.evaluate("baseline:length", data, aspects="oracle", progress=False)
    most = opened.context - 5
    with pytest.raises(DataError, match=r"comparison 'c0'.*even without posts"):
        prb.plan_aspects(policy, data, out=tmp_path / "long", max_new_tokens=most, progress=False)
