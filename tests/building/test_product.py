"""A model on this machine as the generator, all formats of the product, and redaction."""

from __future__ import annotations

import json
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import prb_jax as prb
from prb_jax.building.settings import GATES, load_build_settings
from prb_jax.errors import DataError, RunError
from tests.building.engine import record, served
from tests.building.test_build import build, lines, write_records
from tests.json_lines import write_lines
from tests.parity.stories260k import write_model
from tests.tiny_policies import write_policy

STORIES = Path(__file__).resolve().parents[3] / "shared" / "weights" / "stories260K"
CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "building"


@pytest.mark.slow
def test_a_model_on_this_machine_writes_the_same_pairs_after_a_kill(tmp_path: Path) -> None:
    if STORIES.is_dir():  # a trained one
        write_model(STORIES, tmp_path / "model", causal=True)
    else:
        write_policy(tmp_path / "model", "llama", eos=7)
    data = write_records(tmp_path, 3)
    made = {
        "data": data,
        "generator": {"model": str(tmp_path / "model")},
        "writing": {
            "candidates": 2, "rounds": 1, "least_words": 0, "most_words": 999, "plan_tokens": 8, "max_new_tokens": 12,
            "together": 3, "profile_posts": 1,
        },
        "relax": GATES,
        "product": {"private_share": 0.5},
    }  # fmt: skip
    out, killed = tmp_path / "out", tmp_path / "killed"
    summary = prb.build(made, out=out, progress=False).summary
    rows = (out / "rows.jsonl").read_bytes()
    assert summary["spent"]["generator"]["requests"] == 3 * (3 + 2 * 2)
    assert summary["spent"]["generator"]["reply_tokens"] > 0
    assert summary["pairs"] == len(lines(out / "pairs.jsonl")) > 0
    killed.mkdir()
    (killed / "run.json").write_bytes((out / "run.json").read_bytes())
    (killed / "rows.jsonl").write_bytes(b"".join(rows.splitlines(keepends=True)[:2]))  # two of three rows
    prb.build(made, out=killed, progress=False)
    for name in ("rows.jsonl", "pairs.jsonl", "public.jsonl", "README.md"):
        assert (killed / name).read_bytes() == (out / name).read_bytes()
    for part in ("public", "private"):
        expected = prb.read_comparisons(str(out / f"{part}.jsonl"))
        for place in (part, f"array_record/{part}"):
            assert prb.read_comparisons(str(out / place)) == expected
    write_records(tmp_path, 1, profile=[{"id": "p", "category": "", "text": "long words " * 5000}])
    with pytest.raises(DataError, match=r"cannot process its prompt: .*; lower writing\.profile_posts"):
        prb.build(made, out=tmp_path / "long", progress=False)


def test_redaction_comes_before_anything_reads_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = [{"id": "p", "category": "", "text": "Ask Zadie."}]
    rows = [record(number, profile=profile) for number in range(8)]
    for row in rows:
        row["narrative"] += " Zadie said so."
        row["question"] += " Zadie asks."
    data = write_lines(tmp_path / "data.jsonl", rows)
    monkeypatch.setitem(sys.modules, "scrubadub", None)
    with served() as server:
        build_it = partial(build, server, data, tmp_path / "out", redact=True, relax=GATES)
        with pytest.raises(RunError, match=r"--redact: needs scrubadub.*pip install 'prb-jax\[redact\]'"):
            build_it()
        assert not server.asked
        stand = types.SimpleNamespace(clean=lambda text: text.replace("Zadie", "{{NAME}}"))
        monkeypatch.setitem(sys.modules, "scrubadub", stand)
        built = build_it()
        asked = json.dumps([body for _, body in server.asked])
    written = (built.out / "pairs.jsonl").read_text()
    assert "Zadie" not in asked + written
    assert "{{NAME}}" in asked
    assert "{{NAME}} said so." in written
    assert "redacted by scrubadub" in (built.out / "README.md").read_text()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["writing.least_words=200"], "writing.least_words: expected at most most_words, 100, found 200"),
        (["writing.temperature=0"], "writing.temperature: expected more than 0, found 0.0"),
        (["gates.level=1"], "gates.level: expected more than 0 and less than 1, found 1.0"),
        (["product.formats=csv"], "product.formats: unknown format 'csv'; expected parquet, array_record"),
        (["generator.endpoint=http://x"], "config section 'generator': endpoint and name: expected both or neither"),
        (["generator.model=m", "generator.name=n", "generator.endpoint=u"], "expected model, or endpoint and name"),
        (["writing.candidate=3"], "writing.candidates"),
        ([], "config section 'generator': expected a model on this machine or an endpoint, found none"),
    ],
)  # fmt: skip
def test_settings_that_no_build_can_have(overrides: list[str], message: str) -> None:
    with pytest.raises((DataError, RunError), match=message):
        load_build_settings(CONFIGS / "endpoint.py", ["data=x", *overrides])


def test_the_config_that_comes_with_it() -> None:
    settings: Any = load_build_settings(CONFIGS / "endpoint.py", complete=False)
    assert (settings.writing.least_words, settings.writing.most_words, settings.relax) == (60, 100, ())
