"""`prb past-texts`: the other text is one of another user for the nearest input, or a sample."""

import json
from pathlib import Path
from typing import Any

import pytest

import prb_jax as prb
from prb_jax.behaviour.generation.past_texts import past_texts
from prb_jax.cli import main
from tests.json_lines import write_lines

INPUTS: list[dict[str, Any]] = [
    {"id": "1", "user_id": "ana", "input": "Headline for: the river flooded the town",
     "profile": [{"id": "a", "text": "Rain fell.", "title": "Rain again"}]},
    {"id": "2", "user_id": "ana", "input": "Headline for: the town river is dry", "profile": []},
    {"id": "3", "user_id": "bo", "input": "Headline for: a river, a flooded town", "profile": [{"text": "my tweet"}]},
    {"id": "4", "user_id": "cy", "input": "Headline for: bread prices", "profile": [{"input": "x", "output": "y"}]},
]  # fmt: skip
GOLDS = [{"id": str(k), "output": f"own text {k}"} for k in range(1, 5)]


def write(folder: Path, inputs: Any = INPUTS, golds: Any = GOLDS) -> tuple[Path, Path]:
    paths = folder / "questions.json", folder / "outputs.json"
    for path, value in zip(paths, (inputs, {"task": "LaMP_4", "golds": golds}), strict=True):
        path.write_text(json.dumps(value))
    return paths


def test_pairs_of_other_users_and_of_a_policy(tmp_path, capsys):
    inputs, outputs = write(tmp_path)
    out = tmp_path / "pairs.jsonl"
    assert main(["past-texts", "--inputs", str(inputs), "--outputs", str(outputs), "--out", str(out)]) == 0
    assert "4 pairs of 3 users" in capsys.readouterr().out
    first, _, third, fourth = pairs = list(prb.read_comparisons(str(out)))
    assert [pair.id for pair in pairs] == [f"{k}:other_user" for k in range(1, 5)]
    assert (first.user_id, first.subset) == ("ana", "other_user")
    assert first.responses == ("own text 1", "own text 3")  # not of the same user, though it is similar
    assert third.responses[1] == "own text 1"
    assert [pair.profile[0].text for pair in (first, third, fourth)] == [
        "Rain fell.\nRain again",
        "my tweet",
        "x\ny",
    ]
    # samples of that file are further pairs
    run = tmp_path / "samples"
    run.mkdir()
    inputs_of_run = {"model": {}, "data": {}, "limit": None, "sampling": {"n": 1}}
    (run / "run.json").write_text(
        json.dumps({"kind": "prb_jax samples", "inputs": inputs_of_run, "command": []})
    )
    (run / "summary.json").write_text("{}")
    row = {"prompt_token_ids": [], "token_ids": [], "logprob": 0, "sampled_logprob": 0, "finish": "stop"}
    texts = {"1": "a sample", "2": "  ", "3": "own text 3", "4": "another"}
    lines = [{"id": f"{k}:other_user", "sample": 0, "text": text, **row} for k, text in texts.items()]
    write_lines(run / "samples.jsonl", lines)
    more = past_texts(inputs, outputs, out=tmp_path / "more.jsonl", samples=[run])
    assert (more.counts, more.without) == ({"other_user": 4, "policy": 2}, {"policy": 2})
    (sampled,) = (pair for pair in prb.read_comparisons(more.path) if pair.id == "1:policy")
    assert sampled.responses == ("own text 1", "a sample")


def test_bad_files_are_one_error_and_a_repeated_call_is_none(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    wrong: list[tuple[Any, Any, str]] = [
        ({}, GOLDS, "expected a list of {id, input, profile}"),
        (INPUTS, GOLDS[1:], "has no output of '1'"),
        ([*INPUTS, INPUTS[0]], GOLDS, r"\[4\]: a second input with the id '1'"),
        ([{**INPUTS[0], "input": " "}], GOLDS, r"\[0\]: field 'input': expected a text"),
        ([{**INPUTS[0], "profile": [{"title": "x"}]}], GOLDS, r"profile\[0\]: expected \{text, title\} or"),
        (INPUTS[:2], GOLDS, "expected two users or more, found 1"),
    ]
    for inputs, golds, message in wrong:
        with pytest.raises(prb.DataError, match=message):
            past_texts(*write(tmp_path, inputs, golds), out=out)
    assert not out.exists()
    out.touch()
    with pytest.raises(prb.RunError, match="exists already with other contents"):
        past_texts(*write(tmp_path), out=out)
    out.unlink()
    first = past_texts(*write(tmp_path), out=out)
    assert "finished already" not in capsys.readouterr().err
    assert past_texts(*write(tmp_path), out=out) == first
    assert capsys.readouterr().err == f"prb: {out}: finished already by an earlier call\n"
