"""`prb judge`: the paper's way with all its quirks, both orders by text and by logits, and what a run keeps."""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.generation.policy import Policy, Sample
from prb_jax.behaviour.judges import chat, paper
from prb_jax.behaviour.judges.chat import Drawing, InWords
from prb_jax.behaviour.judges.options import JudgeOptions
from prb_jax.behaviour.judges.pairs import pair_messages
from prb_jax.behaviour.judges.paper import PaperPairs, paper_first
from prb_jax.behaviour.judges.replies import read_verdict
from prb_jax.errors import RunError
from prb_jax.records.comparison import Message
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.text.prompts import prompt_texts
from tests.behaviour.judges.stand_in import comparisons, judged, stand_in
from tests.json_lines import read_lines, write_lines
from tests.tiny_policies import write_policy


def longer(text: str) -> str:
    """The letter of the longer one of two answers."""
    a, _, rest = text.partition("Answer A:\n")[2].partition("\n\nAnswer B:\n")
    return "A" if len(a) > len(rest.split("\n\n")[0]) else "B"


def test_the_paper_s_coin():
    shown = paper_first(comparisons(1000))
    assert "".join("AB"[first] for first in shown[:32]) == "BAAABBBAAAABAABBABBABBAABAAABBBB"
    assert [shown[:count].count(0) for count in (10, 100, 1000)] == [6, 50, 480]
    mixed = [*comparisons(5, subset="x"), *comparisons(5, subset="y")]
    assert paper_first(mixed) == shown[:5] * 2


def test_both_orders_at_an_endpoint(tmp_path, capsys):
    """A judge that is right but for one comparison that it cannot read and two in which it always says A."""

    def reply(text: str, _: int) -> str:
        if "Question 0?" in text:
            return "I cannot say."
        return "A" if "Question 1?" in text or "Question 2?" in text else longer(text)

    out = tmp_path / "run"
    data = write_lines(tmp_path / "data.jsonl", [comparison.to_row() for comparison in comparisons(8)])
    with stand_in(reply) as server:
        command = [
            "judge", "--endpoint", server.url, "--model", "judge-1", "--data", data, "--out", str(out),
            "--profile-posts", "1", "--price", "1", "2", "--no-progress",
        ]  # fmt: skip
        assert cli.main(command) == 0
        assert len(server.asked) == 16
        assert all("I like walks" in body["messages"][-1]["content"] for _, body in server.asked)
        assert (cli.main(command), len(server.asked)) == (0, 16)
        other = judged(server, data, tmp_path / "paperless", profile_posts=0, reason=True)
    assert "order consistent accuracy: 0.6250" in capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["model"], summary["n"], summary["accuracy"], summary["ties"]) == ("judge-1", 8, 5 / 8, 3)
    figures = summary["judge"]
    assert figures["order_consistent_accuracy"] == figures["consistent"] == 5 / 8
    assert (figures["unparsable"], figures["unparsable_verdicts"]) == (1, 2)
    assert (figures["said_a"], figures["said_b"]) == (9, 5)
    assert figures["position_bias"] == pytest.approx(4 / 14)
    assert (figures["requests"], figures["prompt_tokens"], figures["completion_tokens"]) == (16, 160, 32)
    assert figures["cost_dollars"] == pytest.approx((160 + 2 * 32) / 1e6)
    rows = read_lines(out / "judgements.jsonl")
    assert (rows[1]["verdicts"], rows[0]["replies"]) == (["A", "A"], ["I cannot say."] * 2)
    assert other.summary["judge"]["order_consistent_accuracy"] == 5 / 8
    (pair,) = prb.compare(out, tmp_path / "paperless")["pairs"]
    assert (pair["n"], pair["difference"]) == (8, 0.0)


def test_the_paper_s_way(tmp_path, monkeypatch):
    texts = {"pairwise_system.txt": "Judge.", "pairwise_user.txt": "{question}|{Response_A}|{Response_B}"}
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text + "\n")

    def by(reply: Any, name: str) -> dict[str, Any]:
        with stand_in(reply) as server:
            run = judged(server, comparisons(10), tmp_path / name, protocol="paper", prompts=str(folder))
            assert {body["messages"][0]["content"] for _, body in server.asked} == {"Judge."}
            return run.summary

    with pytest.raises(RunError, match="not the paper's file: expected sha256 5438903c1bb5524d"):
        by(lambda text, _: "A", "other")
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}
    monkeypatch.setattr(paper, "PAIR_PROMPTS", digests)
    with pytest.warns(prb.PrbWarning, match="no comparison could be judged"):
        mute = by(lambda text, _: "no idea", "mute")  # as if it always said A: chosen is in A in 6 of 10
    figures = mute["judge"]
    assert (mute["accuracy"], figures["accuracy"], figures["failed_parses"]) == (0.6, 0.6, 10)
    assert figures["chosen_in_a"] == {"n": 6, "accuracy": 1.0}
    assert figures["chosen_in_b"] == {"n": 4, "accuracy": 0.0}
    assert (figures["position_bias"], figures["predicted_b"]) == (1.0, 0)
    with pytest.warns(prb.PrbWarning, match="A was named in 10 of 10 verdicts, whatever was shown as A"):
        always = by(lambda text, _: "Result: A", "always")
    assert always["judge"]["warning"].startswith("A was named in 10 of 10 verdicts")

    def right(text: str, tries: int) -> str:
        a, b = text.split("|")[1:]
        return f"Result: {'A' if len(a) > len(b) else 'B'}"

    good = by(right, "right")
    assert (good["accuracy"], good["ties"], good["judge"]["position_bias"]) == (1.0, 0, 0.0)
    assert "warning" not in good["judge"]


@pytest.mark.parametrize(
    ("protocol", "options"),
    [("default", {}), ("score", {}), ("default", {"reason": True, "controls": "blind"})],
)
def test_a_judge_that_gives_no_verdict_measures_nothing(protocol, options, tmp_path, capsys):
    """One warning, and no accuracy: neither of the run, nor of its users, subsets, controls and comparisons."""
    data = write_lines(tmp_path / "data.jsonl", [one.to_row() for one in comparisons(8, subset="s")])
    out, controls = tmp_path / "run", options.get("controls")
    with stand_in(lambda text, _: "I cannot say.") as server:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run = judged(server, data, out, protocol=protocol, profile_posts=1, **options)
        command = ["--endpoint", server.url, "--model", "m", "--data", str(data), "--protocol", protocol]
        more = ["--reason", "--controls", "blind"] if controls else []
        assert cli.main(["judge", *command, "--out", str(tmp_path / "cli"), "--no-progress", *more]) == 0
        printed = capsys.readouterr()
    with stand_in(lambda text, _: longer(text)) as server:
        right = judged(server, data, tmp_path / "right", profile_posts=1)
    texts = [str(one.message) for one in told if issubclass(one.category, prb.PrbWarning)]
    reason = "no comparison could be judged, for replies could not be read"
    assert texts == [f"m: {reason}: see judgements.jsonl"]
    assert printed.err.count(reason) == 1
    summary = run.summary
    assert (summary["n"], summary["ties"], summary["ci95_reason"]) == (8, None, reason)
    for key in ("accuracy", "user_accuracy", "coverage", "half_credit_accuracy", "mean_margin", "ci95"):
        assert summary[key] is None, key
    assert summary["accuracy_by_subset"] == {"s": None}
    assert all(figures["difference"] is None for figures in summary["baselines"].values())
    for figures in summary.get("controls", {}).values():
        assert (figures["accuracy"], figures["difference"], figures["difference_ci95_reason"]) == (
            None,
            None,
            reason,
        )
    judge = summary["judge"]
    assert not {judge.get(key) for key in ("order_consistent_accuracy", "consistent", "mean_rating")} - {None}
    assert not (out / "users.csv").exists()
    assert f"m has no accuracy on these data: {reason}." in " ".join(printed.out.split())
    assert [line.split() for line in printed.out.splitlines() if line.strip() == "m"] == [["m"]]
    for runs in ((right.out, out), (out, right.out)):
        with pytest.raises(RunError, match=rf"run: its accuracy is not defined on these data \({reason}\)"):
            prb.compare(*runs)
    assert prb.leaderboard(tmp_path)[-1]["accuracy"] is None
    page = prb.report([out, right.out], out=tmp_path / "page.html").read_text()
    assert reason in page


def test_thoughts_of_a_model_on_this_machine_are_seen_by_their_special_tokens(monkeypatch):
    """Which its text does not show; without such marks the text is kept as it was."""
    monkeypatch.setattr(chat, "encode_prompts", lambda tokenizer, conversations: conversations)

    class Local(Policy):
        tokenizer: Any = None

        def __init__(self) -> None:
            pass

        def sample(self, prompts: Any, **options: Any) -> Any:
            asked.append(options)
            ids = [np.asarray([0, 1, 2, 3, 4]), np.asarray([1, 4]), np.asarray([1, 4])]
            prompts = [np.asarray([4])] * 2 + [
                np.asarray([4, 0])
            ]  # the last one opens thoughts that stay open
            texts = ("AB", "A", "A")
            return [[Sample(*one, one[1], one[1], "stop")] for one in zip(texts, prompts, ids, strict=True)]

        def decode(self, ids: np.ndarray, *, special_tokens: bool = False) -> str:
            assert special_tokens
            return "".join(["[THINK]", "A", "[/THINK]", "B", "</s>"][i] for i in ids)

    asked: list[dict[str, Any]] = []
    replies = InWords(Local(), 8).replies([(Message("user", "?"),)] * 3)
    assert [reply.text for reply in replies] == ["[THINK]A[/THINK]B</s>", "A", "[THINK]A"]
    assert [read_verdict(reply.text) for reply in replies] == ["B", "A", None]
    InWords(Local(), 8, drawing=Drawing(0.5, 2, 3)).replies([(Message("user", "?"),)] * 3, [7, 8, 9])
    assert asked == [
        {"temperature": 0.0, "max_new_tokens": 8},
        {"temperature": 0.5, "max_new_tokens": 8, "n": 2, "seed": 3, "numbers": [7, 8, 9]},
    ]


def test_a_response_that_names_a_place_is_shown_as_it_is():
    """The paper's scripts would show the other response in its place."""
    judge = PaperPairs(cast(Any, None), "Judge.", "{question}|{Response_A}|{Response_B}|{other}")
    pair = prb.Comparison(
        id="1", question="{Response_A}?", chosen="{Response_B} {question}", rejected="no {Response_A}"
    )
    ((_, asked),) = judge.ask(pair, 0, 0)
    assert asked.content == "{Response_A}?|{Response_B} {question}|no {Response_A}|{other}"


def judged_here(folder: Path, out: Path, **options: Any) -> Any:
    """The evaluation of three comparisons by a judge on this machine."""
    return prb.judge(str(folder), comparisons(3), out=out, options=JudgeOptions(**options), progress=False)


def test_verdicts_of_logits_are_those_of_transformers(tmp_path):
    torch = pytest.importorskip("torch", reason="the oracle")
    folder = tmp_path / "policy"
    reference = write_policy(folder, "qwen3", num_hidden_layers=2)
    every = judged_here(folder, tmp_path / "run", profile_posts=1, min_mass=0.0)
    chat, rows = load_tokenizer(folder), read_lines(tmp_path / "run" / "judgements.jsonl")
    letters = [int(chat.tokenize([letter])[0][0]) for letter in "AB"]
    for comparison, row, scored in zip(comparisons(3), rows, every.rows, strict=True):
        probabilities, masses = [], []
        for first in (0, 1):
            messages = pair_messages(comparison, first, profile_posts=1, reason=False)
            ids = chat.tokenize(prompt_texts(chat, [messages]))[0]
            with torch.no_grad():
                logits = reference(torch.tensor(ids[None].astype(np.int64))).logits[0, -1]
            probabilities.append(float(torch.softmax(logits[letters], -1)[0]))
            masses.append(float(torch.softmax(logits, -1)[letters].sum()))
        assert row["probability_of_a"] == pytest.approx(probabilities, abs=1e-5)
        assert row["letter_mass"] == pytest.approx(masses, abs=1e-6)
        share = (probabilities[0] + 1 - probabilities[1]) / 2
        assert list(scored.scores) == pytest.approx([share, 1 - share], abs=1e-5)
        assert row["verdicts"] == ["A" if p > 0.5 else "B" for p in probabilities]
    figures = every.summary["judge"]
    assert (figures["n"], figures["low_letter_mass"], figures["mean_letter_mass"] < 0.1) == (3, 0, True)
    # A random model would reply with something else: no verdict, unless the user takes every one.
    unread = "no comparison could be judged, for the model would reply with neither"
    with pytest.warns(prb.PrbWarning, match=unread):
        none = judged_here(folder, tmp_path / "none", profile_posts=1)
    judge = none.summary["judge"]
    assert (judge["unparsable"], judge["low_letter_mass"], none.summary["ties"]) == (3, 3, None)
    assert judge["mean_letter_mass"] == pytest.approx(figures["mean_letter_mass"])


@pytest.mark.slow
def test_a_judge_on_this_machine_replies_in_words(tmp_path):
    """A random model, whose words nobody can read."""
    folder = tmp_path / "policy"
    write_policy(folder, "qwen3", eos=3, num_hidden_layers=1)
    with pytest.warns(prb.PrbWarning, match="no comparison could be judged"):
        run = judged_here(folder, tmp_path / "words", profile_posts=0, reason=True, reason_tokens=8)
    assert (run.summary["judge"]["unparsable"], run.summary["ties"]) == (3, None)  # no figure is defined
    said = [text for row in read_lines(tmp_path / "words" / "judgements.jsonl") for text in row["replies"]]
    asked = [
        pair_messages(comparison, first, profile_posts=0, reason=True)[0].content
        for comparison in comparisons(3)
        for first in (0, 1)
    ]
    expected = prb.load_policy(folder).sample(asked, temperature=0.0, max_new_tokens=8)
    assert said == [sample.text for (sample,) in expected]


def test_what_cannot_be_judged_is_one_error(tmp_path):
    endpoint = prb.EndpointOptions(url="http://127.0.0.1:1/v1", model="m", tries=1)
    triple = prb.Comparison(id="t", question="?", responses=["a", "b", "c"], labels=[1, 0, 0])
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"data": [triple]}, "reads 2 responses, found 3"),
        ({}, "no reply after 1 tries; the last one: ConnectError"),
        ({"model": "x"}, "either a MODEL, or --endpoint"),
        ({"protocol": "paper"}, "--prompts DIR"),
        ({"protocol": "paper", "prompts": str(tmp_path / "none")}, "pairwise_system.txt: cannot be read"),
        ({"protocol": "paper", "prompts": "p", "reason": True}, "--reason"),
        ({"max_length": 5}, "--max-length"),
        ({"min_mass": 0.5}, "--min-mass: belongs to a MODEL"),
    )
    for given, message in cases:
        model, data = given.pop("model", None), given.pop("data", comparisons(1))
        options = JudgeOptions(**given)
        with pytest.raises(prb.PrbError, match=message):
            prb.judge(model, data, out=tmp_path, options=options, endpoint=endpoint, progress=False)
