"""Budgets, temperatures and votes of judges in words, and values for their chat templates: here and at an endpoint."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.judges.judge import open_judge
from prb_jax.metrics.votes import vote_share
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.text.open_tokenizer import load_tokenizer
from tests.behaviour.judges.stand_in import comparisons, completion, judged, stand_in
from tests.json_lines import read_lines, write_lines
from tests.tiny_policies import write_policy


def test_the_interval_of_a_share_of_votes_holds_its_coverage():
    """Of judges whose true shares in the two orders are known: of all draws of n votes, with their probabilities."""
    truths = np.linspace(0.02, 0.98, 25)
    for votes in (3, 8):
        counts = range(votes + 1)
        draws = [binom.pmf(counts, votes, truth) for truth in truths]
        ends = np.asarray([[vote_share([(a, votes), (b, votes)])[1] for b in counts] for a in counts])
        held = [
            np.outer(draws[i], draws[j])[(ends[..., 0] <= truth) & (truth <= ends[..., 1])].sum()
            for i in range(25)
            for j in range(25)
            for truth in [(truths[i] + truths[j]) / 2]
        ]
        assert 0.94 < np.mean(held) < 0.96
        assert min(held) > 0.85
    assert vote_share([(3, 3), (0, 0)]) == (0.5, None)
    assert vote_share([(3, 3), (3, 3)])[0] == 1.0


def test_votes_at_an_endpoint(tmp_path, capsys):
    """Three votes an order: a share, its interval, and the seeds that were sent; a cut reply is no vote."""

    def reply(body: Any, _: int) -> Any:
        text, seed = body["messages"][-1]["content"], body["seed"]
        assert (body["temperature"], body["max_tokens"]) == (0.7, 99)
        assert body["chat_template_kwargs"] == {"enable_thinking": True}
        if "Question 0?" in text:
            return 200, completion("<think>A, no\nVerdict: A", finish_reason="length"), {}
        if "Question 1?" in text:
            return 200, completion("Verdict: A", finish_reason="length" if seed % 3 == 0 else "stop"), {}
        a_is_long = "Answer A:\na long" in text
        return "Verdict: A" if a_is_long or seed % 3 == 0 else "Verdict: B"

    out, data = tmp_path / "run", write_lines(tmp_path / "d.jsonl", [one.to_row() for one in comparisons(6)])
    with stand_in(reply, whole=True) as server:
        command = [
            "judge", "--endpoint", server.url, "--model", "m", "--data", data, "--out", str(out), "--no-progress",
            "--reason", "--reason-tokens", "99", "--temperature", "0.7", "--votes", "3", "--seed", "5",
            "--chat-template-kwargs", '{"enable_thinking": true}',
        ]  # fmt: skip
        assert cli.main(command) == 0
        assert (cli.main(command), len(server.asked)) == (0, 36)
        sent = Counter(body["seed"] for _, body in server.asked)
        backwards = judged(
            server, comparisons(6)[::-1], tmp_path / "backwards", reason=True, reason_tokens=99, temperature=0.7,
            votes=3, seed=5, chat_template_kwargs='{"enable_thinking": true}',
        )  # fmt: skip
    rows = {row["id"]: row for row in read_lines(out / "judgements.jsonl")}
    others = {row["id"]: row for row in read_lines(backwards.out / "judgements.jsonl")}
    assert all(rows[name]["seeds"] == others[name]["seeds"] for name in rows)
    told = [(seed + k) % 2**31 for row in rows.values() for seed in row["seeds"] for k in range(3)]
    assert Counter(told) == sent
    assert (rows["c0"]["verdicts"], rows["c0"]["share"], rows["c0"]["share_ci95"]) == ([None] * 6, 0.5, None)
    assert rows["c0"]["finish"] == ["length"] * 6
    for name in ("c2", "c3", "c4", "c5"):  # one of three seeds in a row is a multiple of three
        low, high = rows[name]["share_ci95"]
        assert rows[name]["share"] == pytest.approx((1 + 2 / 3) / 2)
        assert [low, high] == pytest.approx(vote_share([(3, 3), (2, 3)])[1])
        assert 0.4 < low < rows[name]["share"] < high <= 1.0
    assert (rows["c1"]["share"], Counter(rows["c1"]["verdicts"])) == (0.5, {"A": 4, None: 2})
    scores = {row["id"]: row["scores"] for row in read_lines(out / "scores.jsonl")}
    assert scores["c2"] == pytest.approx([5 / 6, 1 / 6])
    figures = json.loads((out / "summary.json").read_text())["judge"]
    assert (figures["n"], figures["requests"], figures["cut_replies"], figures["unparsable"]) == (6, 36, 8, 1)
    assert (figures["unparsable_verdicts"], figures["order_consistent_accuracy"]) == (8, 4 / 6)
    assert "cut replies: 8" in capsys.readouterr().out
    run = json.loads((out / "run.json").read_text())
    assert '"drawing": {"seed": 5, "temperature": 0.7, "votes": 3}' in json.dumps(run, sort_keys=True)


def test_votes_of_ratings_are_their_mean(tmp_path):
    def reply(body: Any, _: int) -> str:
        return ("Score: 4", "Score: 8", "no idea")[body["seed"] % 3]

    with stand_in(reply, whole=True) as server:
        run = judged(
            server, comparisons(2), tmp_path, protocol="score", reason=True, temperature=1.0, votes=3
        )
    for row in read_lines(run.out / "judgements.jsonl"):
        assert row["ratings"] == [6.0, 6.0]
        assert [sorted(map(str, votes)) for votes in row["votes"]] == [["4.0", "8.0", "None"]] * 2
    assert run.summary["judge"]["unparsable"] == 0


@pytest.mark.slow
def test_votes_of_a_model_on_this_machine_are_its_samples(tmp_path):
    """Of the seeds in the rows, whatever stands beside them in the data."""
    write_policy(tmp_path / "policy", "qwen3", eos=3, num_hidden_layers=1)
    options = prb.JudgeOptions(
        reason=True, reason_tokens=4, temperature=1.0, votes=2, seed=3, profile_posts=0
    )
    judge = open_judge(str(tmp_path / "policy"), options, cache=None)
    protocol: Any = judge.protocol
    data = comparisons(2)
    answers = protocol.model.answers(data, [partial(protocol.ask, one, 0) for one in data], posts=0)
    seeds = [seed for answer in answers for seed in answer.seeds]
    said = [reply.text for answer in answers for reply in answer.replies]
    asked = [turn.content for one in data for (turn,) in protocol.ask(one, 0, 0)]
    drawn = protocol.model.model.sample(asked[::-1], n=2, seed=3, max_new_tokens=4, numbers=seeds[::-1])
    assert said == [one.text for samples in drawn[::-1] for one in samples]
    assert len(set(seeds)) == 4
    assert len(set(said)) > 4


def test_values_for_a_chat_template(tmp_path):
    write_policy(tmp_path / "policy", "qwen3", num_hidden_layers=1)
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}<no>"
        "{% endif %}{% endif %}"
    )
    chat, loading = str(template), LoadOptions(chat_template=str(template))
    values = {"enable_thinking": False}
    plain, told = (
        load_tokenizer(tmp_path / "policy", chat_template=chat),
        load_tokenizer(tmp_path / "policy", chat_template=chat, template_variables=values),
    )
    question = [(prb.records.comparison.Message("user", "?"),)]  # pyright: ignore[reportAttributeAccessIssue]
    assert told.render(question, generation_prompt=True) == ["[user] ?[assistant]<no>"]
    assert plain.render(question, generation_prompt=True) == ["[user] ?[assistant]"]
    assert plain.template_hash != told.template_hash
    with pytest.raises(prb.CheckpointError, match="reads no variable 'enable_thinkin'"):
        load_tokenizer(tmp_path / "policy", chat_template=chat, template_variables={"enable_thinkin": True})
    masses = {}
    for given in (None, '{"enable_thinking": false}', '{"enable_thinking": true}'):
        options = prb.JudgeOptions(chat_template_kwargs=given, min_mass=0.0)
        judge = open_judge(str(tmp_path / "policy"), options, loading=loading, cache=None)
        masses[given] = next(iter(judge.kept_in(tmp_path).stream(comparisons(1)))).scores[0].tolist()
    assert masses[None] == masses['{"enable_thinking": true}'] != masses['{"enable_thinking": false}']


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"votes": 3, "reason": True}, "--votes 3: at temperature 0 all votes are the same"),
        ({"votes": 0, "reason": True}, "--votes: expected 1 or more"),
        ({"temperature": 0.5}, "--temperature: a MODEL replies in words only with --reason"),
        ({"reason_tokens": 9}, "--reason-tokens: a MODEL replies"),
        ({"temperature": -1.0, "reason": True}, "--temperature: expected a finite number"),
        ({"protocol": "paper", "prompts": "p", "votes": 2}, "--votes: the paper's protocols decide"),
        ({"protocol": "paper", "prompts": "p", "chat_template_kwargs": "{\"a\": 1}"}, "--chat-template-kwargs"),
        ({"chat_template_kwargs": "[1]"}, "--chat-template-kwargs: expected a JSON object"),
        ({"chat_template_kwargs": "{"}, "--chat-template-kwargs"),
    ],
)  # fmt: skip
def test_options_that_would_do_nothing_are_refused(options, message, tmp_path: Path):
    with pytest.raises(prb.RunError, match=message):
        open_judge("none", prb.JudgeOptions(**options), cache=None)
