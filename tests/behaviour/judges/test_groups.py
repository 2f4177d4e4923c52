"""Judges of pairs for groups: which responses are compared, what ties and failed replies are worth, as every reward."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.judges.groups import GroupJudge
from prb_jax.behaviour.judges.judge import open_judge
from prb_jax.behaviour.judges.scorer import JudgeScorer
from prb_jax.behaviour.rl.rewards import check_scoring, open_reward
from prb_jax.behaviour.rl.sections import ScoringJudgeSettings, ScoringSettings
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.serving.item_scorer import open_reward as open_served
from tests.behaviour.judges.stand_in import StandIn, stand_in
from tests.json_lines import read_lines, write_lines
from tests.serving.local_server import serving
from tests.tiny_policies import write_policy


def shown(text: str) -> list[str]:
    """The two answers that a judge is shown."""
    a, _, rest = text.partition("Answer A:\n")[2].partition("\n\nAnswer B:\n")
    return [a, rest.split("\n\n")[0]]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(re.findall(r"\d+", answer)[0]) for answer in shown(text))


def larger(text: str, _: int) -> str:
    """Prefers the answer with the larger number; names A where 7 is shown, and nothing where 13 meets 5."""
    a, b = numbers(text)
    if {a, b} == {13, 5}:
        return "Verdict: a tie"
    return "A" if 7 in (a, b) or a > b else "B"


def group(values: list[int], name: str = "g") -> prb.Comparison:
    responses = [f"answer {value}" for value in values]
    labels = [float(value) for value in values] if len(set(values)) > 1 else None
    return prb.Comparison(id=name, question="?", responses=responses, labels=labels)


def opened(server: StandIn, **options: Any) -> JudgeScorer:
    endpoint = prb.EndpointOptions(url=server.url, model="m", backoff=0.01)
    return open_judge(None, prb.JudgeOptions(**options), endpoint=endpoint, cache=None)


def ratings(judge: JudgeScorer, *groups: prb.Comparison) -> list[list[float]]:
    return [scores.tolist() for batch in judge.stream(list(groups)) for scores in batch.scores]


def test_ratings_are_the_results_of_matches():
    values = [3, 9, 1, 12]
    wins = np.asarray(values)[:, None] > np.asarray(values)
    with stand_in(larger) as server:
        (every,) = ratings(opened(server, pairing="all"), group(values))
        assert every == pytest.approx(wins.sum(1) / 3)
        assert len(server.asked) == 12  # six pairs in both orders
        (circle,) = ratings(opened(server, pairing="circular"), group(values))
        beside = [[wins[k, (k + 1) % 4], wins[k, k - 1]] for k in range(4)]
        assert circle == pytest.approx(np.mean(beside, axis=1))
        assert len(server.asked) == 20
        for seed in range(4):
            (cup,) = ratings(opened(server, pairing="knock-out", seed=seed), group(values))
            assert (cup[3], sorted(cup)) == (1.0, [0.0, 0.0, 0.5, 1.0])
        five, three = ratings(opened(server, pairing="knock-out"), group([1, 2, 3, 4, 6]), group([2, 4, 6]))
        assert (five[4], three[2], max(five[:4]) < 1, max(three[:2]) < 1) == (1.0, 1.0, True, True)
        pair, pairs = group([3, 9]), [{"pairing": pairing} for pairing in ("all", "circular", "knock-out")]
        assert [ratings(opened(server, **one), pair)[0] for one in pairs] == [[0.0, 1.0]] * 3


def test_ties_failed_replies_and_equal_texts():
    """A judge that disagrees with itself about 7, and has no verdict on 13 and 5."""
    with stand_in(larger) as server:
        for ties, expected in (
            ("half", [0.25, 0.75, 0.5]),
            ("loss", [0.0, 0.5, 0.0]),
            ("missing", [0.0, 1.0, None]),
        ):
            (found,) = ratings(opened(server, pairing="all", ties=ties), group([3, 9, 7]))
            assert found == pytest.approx([np.nan if one is None else one for one in expected], nan_ok=True)
        (missing,) = ratings(opened(server, pairing="all"), group([13, 5, 9]))
        assert missing == pytest.approx([1.0, 0.0, 0.5])  # 13 and 5 met 9 alone
        (nothing,) = ratings(opened(server, pairing="all"), group([13, 5]))
        (cup,) = ratings(opened(server, pairing="knock-out"), group([13, 5]))
        (alone,) = ratings(opened(server, pairing="all"), group([4]))
        assert np.isnan([*nothing, *cup, *alone]).all()
        before = len(server.asked)
        (same,) = ratings(opened(server, pairing="all"), group([4, 4, 4]))
        (cup,) = ratings(opened(server, pairing="knock-out"), group([4, 4]))
        assert (same, cup, len(server.asked)) == ([0.5] * 3, [0.5] * 2, before)
        (twice,) = ratings(opened(server, pairing="all", ties="loss"), group([4, 4, 2]))
        assert twice == pytest.approx([0.75, 0.75, 0.0])
        (cup,) = ratings(opened(server, pairing="knock-out"), group([4, 4, 2]))
        assert cup == [1.0, 1.0, 0.0]


def test_a_group_is_judged_and_the_best_of_its_samples_taken(tmp_path, capsys):
    rows = [group([3, 9, 1, 12], f"g{k}").to_row() for k in range(3)] + [group([13, 5], "mute").to_row()]
    data, out = write_lines(tmp_path / "data.jsonl", rows), tmp_path / "run"
    with stand_in(larger) as server:
        command = ["judge", "--endpoint", server.url, "--model", "m", "--data", data, "--out", str(out)]
        assert cli.main([*command, "--pairing", "all", "--no-progress"]) == 0
        assert (cli.main([*command, "--pairing", "all", "--no-progress"]), len(server.asked)) == (0, 14)
        texts = [{"id": f"g{k}", "sample": n, "text": f"sample {n}"} for k in range(3) for n in range(1, 4)]
        quality = [{"id": row["id"], "sample": row["sample"], "quality": row["sample"]} for row in texts]
        best = [
            "best-of-n", "--samples", write_lines(tmp_path / "samples.jsonl", texts), "--data", data,
            "--rewards", f"pairs:{server.url}#m", f"judge:{server.url}#m", "--pairing", "knock-out",
            "--quality", write_lines(tmp_path / "quality.jsonl", quality), "--out", str(tmp_path / "best"),
            "--template", write_lines(tmp_path / "t.txt", []), "--no-progress",
        ]  # fmt: skip
        Path(best[best.index("--template") + 1]).write_text(
            "{prompt}{answer}\n\nAnswer A:\n{answer}0\n\nAnswer B:\n0"
        )
        assert cli.main(best) == 2  # "A" is no number of the judge of single responses
        assert "their replies could not be read" in capsys.readouterr().err
        del (
            best[best.index(f"judge:{server.url}#m")],
            best[best.index("--template") : best.index("--template") + 2],
        )
        best[best.index("--out") + 1] = str(tmp_path / "other")
        assert cli.main(best) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["n"], summary["accuracy"], summary["ties"]) == (4, 0.75, 1)
    figures = summary["judge"]
    assert (figures["matches"], figures["missing_matches"], figures["tied_matches"]) == (19, 1, 0)
    assert (figures["unparsable"], figures["unparsable_verdicts"], figures["position_bias"]) == (1, 2, 0.0)
    row = read_lines(out / "judgements.jsonl")[0]
    assert row["matches"] == [list(pair) for pair in itertools.combinations(range(4), 2)]
    assert row["results"] == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    curves = json.loads((tmp_path / "other" / "summary.json").read_text())["curves"]
    (name,) = (name for name in curves if name.startswith("pairs:"))
    assert curves[name][-1]["quality"] == 3.0


def test_a_group_is_rewarded(tmp_path):
    """By `prb ppo`, `prb.reward_fn`, `prb serve`, and `/compare` of NeMo Gym: the same ratings."""
    values, comparison = [3, 9, 9, 12], group([1])
    texts = [f"answer {value}" for value in values]
    expected = [0.0, (1 + 0.5) / 3, (1 + 0.5) / 3, 1.0]
    with stand_in(larger) as server:
        name = f"pairs:{server.url}#m"
        scoring = ScoringSettings(
            judge=ScoringJudgeSettings(ties="loss", reason_tokens=9), scale=2.0, empty=-1.0
        )
        reward = open_reward(PpoSettings(scoring=scoring), name, out=tmp_path)
        check_scoring(scoring, [reward])
        scores = reward.score([comparison], [[*texts, " "]], step=1)
        np.testing.assert_allclose(scores.values, [[*np.multiply(2, expected), -2.0]], rtol=1e-6)
        with pytest.raises(prb.RunError, match=r"step 2: .*no verdict\); the first .*'g'"):
            reward.score([comparison], [["answer 13", "answer 5"]], step=2)
        call = {"prompts": ["?"] * 4 + ["other?"] * 2, "completions": [*texts, "answer 2", "answer 1"]}
        found = prb.reward_fn(name)(**call)
        assert found == pytest.approx([*expected, 1.0, 0.0])
        with pytest.raises(prb.DataError, match=r"completion 0: .*no other response in this call"):
            prb.reward_fn(name)(prompts=["?"], completions=["answer 1"])
        with serving(open_served(name, LoadOptions())) as url:
            assert prb.reward_fn(url)(**call) == pytest.approx(found)
            remote = open_reward(PpoSettings(), url)
            again = remote.score([comparison], [texts], step=1)
            np.testing.assert_allclose(again.values, [expected], rtol=1e-6)
            body: dict[str, Any] = {
                "conversation_history": [{"role": "user", "content": "?"}],
                "response_objs": [
                    {"output": [
                        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hmm"}]},
                        {"type": "message", "content": [{"type": "output_text", "text": text}]},
                    ]}
                    for text in texts
                ],
            }  # fmt: skip
            answer = httpx.post(f"{url}/compare", json=body).json()
            assert answer["rewards"] == pytest.approx(expected)
            body["response_objs"] = body["response_objs"][:1]
            assert httpx.post(f"{url}/compare", json=body).status_code == 422
            broken = {**body, "response_objs": [{"output": []}]}
            assert "response_objs[0].output" in httpx.post(f"{url}/compare", json=broken).text
            assert "principle" in httpx.post(f"{url}/compare", json={**body, "principle": "be kind"}).text
    for settings, message in (
        ({"pairing": "circular"}, "'scoring.judge.pairing': not used by"),
        ({"votes": 2}, "--votes"),
    ):
        asked = ScoringSettings(judge=ScoringJudgeSettings(**settings))
        with stand_in(larger) as server, pytest.raises(prb.RunError, match=message):
            check_scoring(
                asked, [open_reward(PpoSettings(scoring=asked), f"judge:{server.url}#m", out=tmp_path)]
            )


def test_matches_by_logits_are_those_of_the_judge_of_pairs(tmp_path):
    write_policy(tmp_path / "policy", "qwen3", num_hidden_layers=1)
    judge = open_judge(str(tmp_path / "policy"), prb.JudgeOptions(min_mass=0.0, pairing="all"), cache=None)
    assert isinstance(judge.protocol, GroupJudge)
    values, matches = [3, 9, 1], list(itertools.combinations(range(3), 2))
    pairs = [(group([values[i], values[j]]), 0) for i, j in matches]
    of_pairs = dict(zip(matches, judge.protocol.pairs.judge(pairs, posts=0), strict=True))
    sums = np.zeros(3)
    for match, judgement in of_pairs.items():
        sums[list(match)] += judgement.scores
    (found,) = ratings(judge, group(values))
    np.testing.assert_allclose(found, sums / 2, atol=1e-6)
    assert len(set(found)) == 3


def test_a_group_is_rewarded_by_a_model_on_this_machine(tmp_path):
    """Read at its logits, by its path: a reward function, `/compare`, best of n and `prb ppo` give the same ratings."""
    folder = tmp_path / "policy"
    write_policy(folder, "qwen3", num_hidden_layers=1)
    name, texts = f"pairs:{folder}", ["answer 3", "answer 9", "answer 1"]
    options = prb.JudgeOptions(min_mass=0.0)
    comparison = prb.Comparison(id="g", question="?", responses=texts)
    served = open_served(name, LoadOptions(), judge=options)
    (batch,) = served.stream([comparison])
    expected = batch.scores[0].tolist()
    assert len({round(value, 4) for value in expected}) == 3
    call = {"prompts": ["?"] * 3, "completions": texts}
    assert prb.reward_fn(name, judge=options)(**call) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(prb.DataError, match=r"completion 0: .*gave no verdict"):
        prb.reward_fn(name)(**call)  # a random model would reply with neither A nor B
    with serving(served) as url:
        objects = [
            {"output": [{"type": "message", "content": [{"type": "output_text", "text": text}]}]}
            for text in texts
        ]
        body = {"conversation_history": [{"role": "user", "content": "?"}], "response_objs": objects}
        assert httpx.post(f"{url}/compare", json=body).json()["rewards"] == pytest.approx(expected, abs=1e-5)
    scoring = ScoringSettings(judge=ScoringJudgeSettings(min_mass=0.0))
    reward = open_reward(PpoSettings(scoring=scoring), name, out=tmp_path)
    check_scoring(scoring, [reward])
    scores = reward.score([comparison], [texts], step=1)
    np.testing.assert_allclose(scores.values, [expected], atol=1e-5)
    samples = [{"id": "g", "sample": k, "text": text} for k, text in enumerate(texts)]
    quality = [{"id": "g", "sample": k, "quality": value} for k, value in enumerate(expected)]
    row = {"id": "g", "question": "?", "responses": texts, "labels": [1, 0, 0]}
    best = [
        "best-of-n", "--samples", write_lines(tmp_path / "samples.jsonl", samples), "--rewards", name,
        "--data", write_lines(tmp_path / "data.jsonl", [row]), "--min-mass", "0", "--out", str(tmp_path / "best"),
        "--quality", write_lines(tmp_path / "quality.jsonl", quality), "--no-progress",
    ]  # fmt: skip
    assert cli.main(best) == 0
    (rewards,) = read_lines(tmp_path / "best" / "rewards.jsonl")
    assert rewards["scores"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairing": "all", "protocol": "score"}, "--pairing: belongs to --protocol default"),
        ({"pairing": "swiss"}, "--pairing: expected one of all, circular, knock-out"),
        ({"ties": "loss"}, "--ties: belongs to --pairing"),
        ({"ties": "loss", "pairing": "knock-out"}, "--ties: belongs to --pairing all or circular"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, message):
    with pytest.raises(prb.RunError, match=message):
        open_judge("none", prb.JudgeOptions(**options), cache=None)
