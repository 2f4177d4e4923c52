"""`prb build` from records to an evaluated benchmark, with an endpoint that fails in every way."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import zlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import DataError, PrbWarning, RunError
from tests.behaviour.judges.stand_in import Answer, StandIn, completion, stand_in
from tests.building.engine import WORDS, engine, record, served
from tests.json_lines import read_lines as lines
from tests.json_lines import write_lines

COUNT = 24
RELAXED = ("overlap", "blind-reward")


def write_records(folder: Path, count: int, **fields: Any) -> str:
    """Write the first records, all with these fields, and return the name of the file."""
    return write_lines(folder / "data.jsonl", (record(number, **fields) for number in range(count)))


def config(server: StandIn, data: str, **further: Any) -> dict[str, Any]:
    endpoint = {"endpoint": server.url, "backoff": 0.01, "prompt_price": 1.0, "reply_price": 5.0}
    return {
        "data": data,
        "generator": {**endpoint, "name": "writer", "tries": 3},
        "judge": {**endpoint, "name": "judge"},
        "writing": {"candidates": 2, "together": 8},
        "relax": RELAXED,
        "product": {"formats": ("parquet",)},
    } | further


def build(server: StandIn, data: str, out: Path, **further: Any) -> prb.Build:
    return prb.build(config(server, data, **further), out=out, progress=False)


def product(out: Path) -> dict[str, Any]:
    """What the inputs decide: everything but how often an endpoint had to be asked."""
    files = {name: lines(out / f"{name}.jsonl") for name in ("rows", "pairs", "public", "private", "dropped")}
    for row in itertools.chain(*files.values()):
        row.pop("tries", None)
        row.get("provenance", {}).pop("tries", None)
        row.get("provenance", {}).pop("generator_digest", None)  # the two endpoints have other addresses
    return {**files, "card": (out / "public" / "README.md").read_text()}


def trouble(body: dict[str, Any], tries: int) -> Answer | None:
    """What an endpoint does now and then: each request has its own trouble, the first time it is made."""
    which = zlib.crc32(json.dumps(body).encode()) % 8
    if tries or which > 4:
        return None
    whole = completion("Half an answer that", finish_reason="length")
    return [
        (429, b"{}", {"Retry-After": "0.01"}),
        (500, b"<html>", {}),
        (200, whole[:-20], {}),
        (200, b'{"answer": "of another schema"}', {}),
        (200, b"", {}),
    ][which]


@pytest.mark.slow
def test_a_build_through_an_endpoint_in_trouble(tmp_path: Path) -> None:
    """No row is lost, none doubled; what was killed ends with the same bytes; the product is a benchmark."""
    data = write_records(tmp_path, COUNT)
    reply = engine()
    with stand_in(lambda body, tries: trouble(body, tries) or reply(body), whole=True) as server:
        small = "the pairs are too few to exclude one: .*style: a leak up to 0.* is not excluded"
        with pytest.warns(PrbWarning, match=small):
            built = build(server, data, tmp_path / "out")
        asked = len(server.asked)
        assert build(server, data, tmp_path / "out").summary == built.summary
        assert len(server.asked) == asked

    wrong, refused = [True], list[int]()

    def stops(body: dict[str, Any], _: int) -> str | Answer:
        if wrong[0] and len(other.asked) > 100:
            refused.append(1)
            return 401, b"who are you", {}
        return reply(body)

    with stand_in(stops, whole=True) as other:
        alone = {"generator": {**config(other, data)["generator"], "concurrency": 1}}
        with pytest.raises(RunError, match="status 401: 'who are you'; set PRB_ENDPOINT_KEY"):
            build(other, data, tmp_path / "stopped", **alone)
        rows = tmp_path / "stopped" / "rows.jsonl"
        assert len(lines(rows)) == 8
        with rows.open("ab") as file:  # as a kill leaves it
            file.write(b'{"id": "q8", "no_p')
        wrong[0] = False
        build(other, data, tmp_path / "stopped", **alone)
        # Nothing is asked twice but what was on its way when the error came; the eight rows would be 88 requests more.
        assert 0 <= len(other.asked) - len(refused) - COUNT * (3 + 2 * 2 + 4) <= 8
    assert product(tmp_path / "stopped") == product(tmp_path / "out")

    rows = lines(built.out / "rows.jsonl")
    assert [row["id"] for row in rows] == [f"q{number}" for number in range(COUNT)]
    summary, spent = built.summary, built.summary["spent"]
    requests = COUNT * (3 + 2 * 2)
    assert spent["generator"]["requests"] == requests
    assert spent["generator"]["tries"] + spent["judge"]["tries"] == asked
    assert spent["generator"]["tries"] > requests
    assert spent["generator"]["dollars"] == pytest.approx((10 * requests * 1.0 + 2 * requests * 5.0) / 1e6)
    assert spent["judge"]["requests"] == 4 * COUNT

    pairs = lines(built.out / "pairs.jsonl")
    parts = {name: lines(built.out / f"{name}.jsonl") for name in ("public", "private")}
    assert {row["id"] for row in pairs} == {row["id"] for part in parts.values() for row in part}
    assert summary["parts"] == {name: len(part) for name, part in parts.items()}
    for key in ("user_id", "question"):
        assert not {row[key] for row in parts["public"]} & {row[key] for row in parts["private"]}
    assert not any("rubric_aspects" in row or "narrative" in row for row in parts["public"])
    assert all("rubric_aspects" in row for row in parts["private"])
    for name, part in parts.items():
        assert {row["canary"] for row in part} == {summary["canaries"][name]}
    for row in pairs:
        wanted = {WORDS[aspect["aspect"].split()[0]] for aspect in row["rubric_aspects"]}
        assert wanted <= set(re.findall(r"\w+", row["chosen"].lower()))
        assert not wanted & set(re.findall(r"\w+", row["rejected"].lower()))
        assert row["provenance"]["generator"] == "writer"
        gates = [row["provenance"]["gates"][name] for name in ("refusals", "style", "overlap")]
        assert gates == ["passed", "cannot tell", "not tried"]
    card = (built.out / "public" / "README.md").read_text()
    assert "**Relaxed gates: blind-reward, overlap.**" in card
    assert "**Never tried: overlap, blind-reward.** Their models or data were not given." in card
    assert re.search(r"\| overlap \| - \| - \| 0 \| \*\*relaxed\*\* \(not tried\) \|", card)
    assert summary["canaries"]["public"] in card
    assert pq.read_table(built.out / "public" / "data").num_rows == len(parts["public"])
    for place in ("public.jsonl", "public", "pairs.jsonl"):
        read = prb.read_comparisons(str(built.out / place))
        assert prb.evaluate("baseline:random", read, progress=False).summary["n"] == len(read) > 0


def test_what_is_not_answered_for_is_noted_and_asked_again(tmp_path: Path) -> None:
    data = write_records(tmp_path, 9)
    reply, down = engine(), [True]

    def answer(body: dict[str, Any], _: int) -> str | Answer:
        if down[0] and "day 3" in body["messages"][-1]["content"]:
            return 400, b'{"error": "filtered"}', {}
        return reply(body)

    out = tmp_path / "out"
    with stand_in(answer, whole=True) as server:
        unanswered = r"1 of 9 records have no answer from the endpoint, first 'q3': .*status 400"
        with pytest.raises(RunError, match=unanswered):
            build(server, data, out)
        assert len(lines(out / "rows.jsonl")) == 8
        assert [row["id"] for row in lines(out / "failures.jsonl")] == ["q3"]
        assert not (out / "pairs.jsonl").exists()
        down[0], asked = False, len(server.asked)
        assert build(server, data, out).summary["pairs"] == 9
        assert len(server.asked) - asked == 7 + 4 * 9
    assert [row["id"] for row in lines(out / "rows.jsonl")] == [f"q{number}" for number in range(9)]


def test_a_generator_that_always_refuses(tmp_path: Path) -> None:
    data = write_records(tmp_path, 20)
    with served(refuse=True) as server:
        for _ in range(2):
            refuses = "gave no pair for any of the first 8 records: no chosen answer: refuses"
            with pytest.raises(RunError, match=refuses):
                build(server, data, tmp_path / "out")
        assert len(server.asked) == 8 * (3 + 2 * 2 * 3)  # eight records of twenty, and once


HUMOUR = [{"aspect": text} for text in ("wants humour", "no humour, please", "not humour")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rubric_aspects": None}, r"data.jsonl:2: field 'rubric_aspects': missing; --aspects derives"),
        ({"rubric_aspects": None, "narrative": " "}, r"data.jsonl:2: field 'rubric_aspects': missing, and there is no"),
        ({"rubric_aspects": HUMOUR}, r"data.jsonl:2: .*'wants humour' and 'not humour' contradict each other"),
        ({"question": None}, r"data.jsonl:2: field 'question': missing"),
        ({"id": "q0"}, r"data.jsonl:2: field 'id': 'q0' was already used at .*data.jsonl:1"),
    ],
)  # fmt: skip
def test_records_that_nothing_can_be_built_from(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    data = write_lines(tmp_path / "data.jsonl", [record(0), record(1, **fields)])
    with stand_in(lambda text, _: "no") as server:
        with pytest.raises(DataError, match=message):
            build(server, data, tmp_path / "out")
        assert not server.asked


def test_aspects_come_from_the_narrative_with_evidence(tmp_path: Path) -> None:
    data = write_records(tmp_path, 8, rubric_aspects=None)
    relax = (*RELAXED, "blind-judge", "style")
    with served() as server:
        built = build(server, data, tmp_path / "out", aspects=True, relax=relax)
    assert built.summary["aspects_derived"] == 8
    for row in lines(tmp_path / "out" / "pairs.jsonl"):
        assert row["rubric_aspects"]
        assert all(aspect["evidence"] in row["narrative"] for aspect in row["rubric_aspects"])
        assert row["provenance"]["aspects_derived"]


def test_gates_that_nothing_is_given_for(tmp_path: Path) -> None:
    with stand_in(lambda text, _: "no") as server:
        for relax, message in (
            (RELAXED[:1], "gates without a model or data: blind-reward: .*--relax blind-reward"),
            (RELAXED[1:], "gates without a model or data: overlap: .*--relax overlap"),
            (("lenght",), "relax: unknown gate 'lenght'"),
        ):
            with pytest.raises(RunError, match=message):
                build(server, str(tmp_path / "none.jsonl"), tmp_path / "no", relax=relax)


def test_gates_fail_and_are_relaxed_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chosen answers are longer, and a judge likes them without knowing anybody; the card's command repeats it."""
    data = write_records(tmp_path, 18)
    out, failed = tmp_path / "out", ("length", "style", "style-histogram", "blind-judge")
    config = "def get_config():\n    return {'product': {'formats': ['parquet']}}\n"
    (tmp_path / "build.py").write_text(config)
    with served(blind=True, longer=True) as server:
        words = [
            "build", str(tmp_path / "build.py"), f"data={data}",
            f"generator.endpoint={server.url}", "generator.name=writer", "generator.backoff=0.01",
            f"judge.endpoint={server.url}", "judge.name=judge", "writing.candidates=2", "writing.together=8",
            "--out", str(out), "--no-progress", *(word for name in RELAXED for word in ("--relax", name)),
        ]  # fmt: skip
        assert cli.main(words) == 2
        one = r": 1\.000 \[0\.\d+\.\.1\.000\] of 18 pairs: .*"
        expected = "4 of 13 gates failed" + "".join(f".*{name}{one}" for name in failed)
        assert re.search(expected, capsys.readouterr().err)
        assert (out / "gate_figures.json").exists()
        assert not (out / "public.jsonl").exists()
        asked = len(server.asked)
        assert cli.main([*words, *(word for name in failed for word in ("--relax", name))]) == 0
        shown = capsys.readouterr().out
        assert (shown.count("FAILED  relaxed"), shown.count("not tried  relaxed")) == (4, 2)
        with pytest.raises(RunError, match="the build was finished without relaxing yield"):
            build(server, data, out, relax=(*RELAXED, *failed, "yield"))
        assert len(server.asked) == asked
        card = (out / "README.md").read_text()
        assert f"**Relaxed gates: {', '.join(sorted([*RELAXED, *failed]))}.**" in card
        one = r"1\.000 \[0\.\d+\.\.1\.000\]"
        assert re.search(rf"\| blind-judge \| {one} \| {one} \| 0 \| \*\*relaxed\*\* \(leak found\) \|", card)
        assert re.search(r"\| blind-judge \| leak found \| 0\.500 \| 0\.\d+ \| the judge prefers", card)
        line = re.search(r"This command repeats the build:\n\n    prb (.*)\n", card)
        assert line is not None
        command = [str(tmp_path / "again") if word == str(out) else word for word in shlex.split(line[1])]
        assert cli.main(command) == 0
        assert (tmp_path / "again" / "pairs.jsonl").read_bytes() == (out / "pairs.jsonl").read_bytes()
    with stand_in(lambda text, _: "no") as other, pytest.raises(RunError, match=r"generator\.endpoint: "):
        build(other, data, out)
