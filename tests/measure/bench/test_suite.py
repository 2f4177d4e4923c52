"""`prb bench all`: the rows of a machine, what becomes of each, and two machines beside each other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prb_jax.cli import main as prb
from prb_jax.cli import parser
from prb_jax.errors import RunError
from prb_jax.measure.bench.machine import Machine
from prb_jax.measure.bench.rows import BenchRow, missing_rivals, plan_rows
from prb_jax.measure.bench.suite import TimeIsOver, bench_all, failures, run_command
from prb_jax.measure.bench.suite_tables import compare_benches
from tests.tiny_models import write_tiny_model

INSTALLED = dict.fromkeys(("jax", "torch", "transformers", "trl"), "1.0")


def machine(
    platform: str, kind: str, gib: float, *, count: int = 1, peak: float = 1e5, **more: Any
) -> Machine:
    dtypes = ("float32",) if platform == "cpu" else ("bfloat16", "float32")
    peaks, versions = dict.fromkeys(dtypes, peak), {**INSTALLED, "vllm": None}
    return Machine(platform, kind, count, int(gib * 2**30), 2, peaks, versions, **more)


CPU = machine("cpu", "AMD EPYC", 24, peak=150)
H100 = machine("gpu", "NVIDIA H100", 79, peak=7e5, torch_device="cuda")
H200 = machine("gpu", "NVIDIA H200", 140, peak=7e5, torch_device="cuda")
V5E = machine("tpu", "TPU v5 lite", 15.75, peak=1.9e5)


@pytest.mark.parametrize(
    ("where", "models", "without_kernels"),
    [
        (CPU, ["qwen3-40m", "qwen3-40m", "qwen3-40m", "qwen3-110m-a40m", "qwen3-110m-a40m"], False),
        (H100, ["qwen3-8b", "qwen3-1.7b", "qwen3-8b", "qwen3-110m-a40m", "qwen3-110m-a40m"], True),
        (H200, ["qwen3-8b", "qwen3-4b", "qwen3-8b", "qwen3-30b-a3b", "qwen3-110m-a40m"], True),
        (V5E, ["qwen3-4b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-110m-a40m", "qwen3-110m-a40m"], True),
    ],
    ids=lambda value: value.kind if isinstance(value, Machine) else "",
)  # fmt: skip
def test_the_rows_fill_the_device(where: Machine, models: list[str], without_kernels: bool) -> None:
    plan = plan_rows(where, missing=missing_rivals(where))
    rows = {row.id: row for row in plan}
    assert len(rows) == len(plan)
    names = ["score-k2", "train-full", "train-lora", "score-k2-moe", "train-lora-moe"]
    assert [rows[name].model for name in names] == models
    always = "score-k16 score-k64 score-users train-users train-head sample-1 serve ppo"
    assert set(always.split()) <= rows.keys()
    by_xla = {name for name in rows if name.endswith("-xla") and "parity" not in name}
    assert by_xla == ({"score-k2-xla", "score-k16-xla", "train-full-xla"} if without_kernels else set())
    usual, other = ("float32", "bfloat16") if where is CPU else ("bfloat16", "float32")
    assert ("score-k16-bfloat16" in rows) == (where is CPU)
    before: set[str] = set()
    for row in plan:
        assert row.verb == "parity" or row.needs in before  # no speed without parity, which comes first
        before.add(row.id)
        assert row.flags["dtype"] == (other if other in row.id else usual)
        options = parser("bench").parse_args(["bench", *row.words(row.model)])  # a command that there is
        assert options.attention == row.flags.get("attention", "auto") if "attention" in options else True


def test_the_time_of_a_row_is_estimated_by_the_peak_of_its_dtype() -> None:
    fast = replace(CPU, peak_gflops={**CPU.peak_gflops, "bfloat16": 8 * CPU.peak_gflops["float32"]})
    usual, faster = ({row.id: row.seconds for row in plan_rows(where, missing={})} for where in (CPU, fast))
    assert faster["score-k16"] == usual["score-k16"] == usual["score-k16-bfloat16"]
    assert faster["score-k16-bfloat16"] < usual["score-k16-bfloat16"]


def test_a_rival_that_is_not_there_is_named() -> None:
    """TPUs have no torch, this GPU has a torch without it, this CPU no TRL."""
    assert "torch does not support tpu here" in missing_rivals(V5E)["transformers"]
    blind = machine("gpu", "NVIDIA H100", 79, torch_device="cpu")
    assert "sees no GPU" in missing_rivals(blind)["trl"]
    bare = machine("cpu", "x", 8)
    bare.versions["trl"] = None
    rows = {row.id: row for row in plan_rows(bare, missing=missing_rivals(bare))}
    assert rows["train-full"].absent == "trl: trl not installed"
    assert "--against" not in rows["train-full"].words("m")
    assert rows["score-k2"].words("m")[-2:] == ["--against", "transformers-cached"]
    beside = {row.id: row for row in plan_rows(H100, missing=missing_rivals(H100))}
    assert beside["score-k2"].environment == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}
    command = beside["score-k2"].command(["score", "m"])
    assert command.startswith("XLA_PYTHON_CLIENT_MEM_FRACTION=0.45 prb bench ")
    assert beside["score-k2-vllm"].absent == "vllm: vllm not installed"


class Fake:
    """In the place of processes: what each verb would write. `broken` names rows, by id, and what they raise."""

    def __init__(
        self, where: Machine = CPU, broken: Mapping[str, Exception] | None = None, rate: float = 2.0
    ) -> None:
        self.where, self.broken, self.rate, self.agrees = where, broken or {}, rate, True
        self.ran: list[str] = []

    def __call__(
        self, words: Sequence[str], *, environment: Mapping[str, str], seconds: float, log: Path
    ) -> list[dict[str, Any]]:
        if words[0] == "machine":
            return [{**vars(self.where), "peak_memory_bytes": 1}]
        self.ran.append(log.stem)
        if log.stem in self.broken and (self.broken[log.stem].args[0] != "rival" or "--against" in words):
            raise self.broken[log.stem]
        memory = {"peak_memory_bytes": 2**30}
        if words[0] == "parity":
            return [memory | {"agrees": self.agrees, "rms_difference": 1e-3, "tolerance": 1e-5}]
        keys = ("pairs_per_second", "tokens_per_second", "scores_per_second", "offline_per_second")
        speed = {"peak_share": 0.8, "rollout_seconds": 1.0, "update_seconds": 2.0}
        speed |= dict.fromkeys(keys, self.rate) | {"speedup": 1.5 if "--against" in words else None}
        return [memory | speed]


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prb_jax.measure.bench.suite.make_model", lambda *arguments, **options: None)


def measure(folder: Path, fake: Fake, **options: Any) -> dict[str, dict[str, Any]]:
    bench = bench_all(out=folder, runner=fake, say=lambda _: None, minutes=1000, **options)
    assert json.loads((folder / "bench.json").read_text()) == bench
    return {row["id"]: row for row in bench["rows"]}


def test_what_is_measured_stays_and_what_failed_is_tried_again(tmp_path: Path) -> None:
    errors = {"score-k16": RunError("rival"), "ppo": RunError("no memory | for it"), "serve": TimeIsOver("")}
    fake = Fake(broken=errors)
    rows = measure(tmp_path, fake)
    plan = plan_rows(CPU, missing={})
    assert list(rows) == [row.id for row in plan]
    assert rows["score-k16"]["status"] == "measured"
    assert rows["score-k16"]["absent"].startswith("transformers-cached failed: rival")
    assert "--against" not in rows["score-k16"]["command"]
    assert (rows["ppo"]["status"], rows["ppo"]["message"]) == ("failed", "no memory | for it")
    assert rows["serve"]["status"] == "not measured"
    assert failures({"rows": list(rows.values())}) == ["ppo"]
    page, table = (tmp_path / "bench.html").read_text(), (tmp_path / "bench.md").read_text()
    for text in (page, table):
        assert "2 comparisons/s" in text
        assert "20 steps/min" not in text
        assert "prb bench score qwen3-40m --dtype float32 --responses 16" in text
    again = Fake()
    rows = measure(tmp_path, again)
    assert again.ran == ["serve", "ppo"]
    assert all(row["status"] == "measured" for row in rows.values())
    assert "20 steps/min" in (tmp_path / "bench.md").read_text()


def test_without_parity_there_is_no_speed(tmp_path: Path) -> None:
    fake = Fake()
    fake.agrees = False
    rows = measure(tmp_path, fake, rows=["score-k2", "train-head"])
    assert fake.ran == ["parity-float32-auto", "train-parity-float32-auto"]
    assert {name: row["status"] for name, row in rows.items()} == {
        "parity-float32-auto": "failed",
        "score-k2": "no parity",
        "train-parity-float32-auto": "failed",
        "train-head": "no parity",
    }
    assert "rms 1.0e-03; tolerance 1e-05" in rows["score-k2"]["message"]
    assert "comparisons/s" not in (tmp_path / "bench.md").read_text()


def test_the_minutes_are_a_budget(tmp_path: Path) -> None:
    now, lines = iter(range(0, 10_000, 40)), list[str]()
    bench = bench_all(
        out=tmp_path, runner=Fake(), minutes=6, clock=lambda: float(next(now)), say=lines.append
    )
    assert re.fullmatch(r"parity-float32-auto: about \d+ s \.\.\.", lines[0])
    assert re.fullmatch(r"parity-float32-auto: measured in \d+ s", lines[1])
    status = {row["id"]: row["status"] for row in bench["rows"]}
    assert status["parity-float32-auto"] == "measured"
    assert list(status.values()).count("not measured") > 5
    assert any("of --minutes were left" in row["message"] for row in bench["rows"])


def test_another_machine_or_version_needs_another_folder(tmp_path: Path) -> None:
    measure(tmp_path, Fake(), rows=["score-k2"])
    newer = machine("cpu", "AMD EPYC", 24, peak=150)
    newer.versions["jax"] = "2.0"
    with pytest.raises(RunError, match=r'versions.jax: "1.0" -> "2.0"[^$]*another folder'):
        measure(tmp_path, Fake(newer))
    unknown = "--rows: no row score-k3 on this machine; expected parity-float32-auto"
    with pytest.raises(RunError, match=unknown):
        measure(tmp_path, Fake(), rows=["score-k3"])


def test_a_kill_loses_no_row(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, Fake(broken={"score-k64": KeyboardInterrupt("now")}))  # pyright: ignore[reportArgumentType]
    assert (tmp_path / "bench.md").exists()
    again = Fake()
    measure(tmp_path, again)
    assert again.ran[0] == "score-k64"


def test_two_machines_are_compared_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = tmp_path / "slow", tmp_path / "fast"
    measure(slow, Fake(H100), rows=["score-k2", "train-full", "score-k16"])
    measure(fast, Fake(H200, rate=3.0), rows=["score-k2", "train-full", "sample-1"])
    compared = compare_benches(slow, fast / "bench.json")
    assert compared.rows == [("score-k2", "comparisons/s", 2.0, 3.0)]
    assert "qwen3-1.7b" in compared.refused["train-full"]  # each had another model
    assert "no such row" in compared.refused["score-k16"]
    assert compared.differing["kind"] == ('"NVIDIA H100"', '"NVIDIA H200"')
    assert prb(["bench", "compare", str(slow), str(fast)]) == 0
    shown = capsys.readouterr().out
    for text in ("1.50x", 'differs: kind: "NVIDIA H100" -> "NVIDIA H200"', "not compared: train-full: model"):
        assert text in shown
    (tmp_path / "other.json").write_text("{}")
    assert prb(["bench", "compare", str(slow), str(tmp_path / "other.json")]) == 2
    assert "expected a file of `prb bench all`" in capsys.readouterr().err


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"unknown verb 'nothing'.*exit status 2"):
        run_command(["nothing"], environment={}, seconds=60, log=tmp_path / "logs" / "a.log")
    with pytest.raises(TimeIsOver):
        run_command(["machine"], environment={}, seconds=0.01, log=tmp_path / "logs" / "b.log")


def test_the_commands_are_run(tmp_path: Path, bench: Callable[..., Any]) -> None:
    """Nothing is faked: the devices, the check of scores, and a row, with the model of a folder."""
    model = write_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=1)
    sizes: Any = {"prefix_tokens": 60, "response_tokens": 12, "rows": ["score-k2"], "model": str(model)}
    whole = bench_all(
        out=tmp_path / "out", runner=lambda words, **_: bench(*words), say=lambda _: None, **sizes
    )
    parity, score = whole["rows"]
    assert parity["result"]["agrees"]
    assert parity["result"]["against_difference"] < 1e-5
    assert score["status"] == "measured"
    assert score["result"]["largest_difference"] < 1e-5
    assert score["result"]["peak_memory_bytes"] > 2**20
    assert "comparisons/s" in (tmp_path / "out" / "bench.md").read_text()


def test_rows_are_commands_for_a_shell() -> None:
    row = BenchRow(id="r", verb="score", model="a b", flags={"responses": [2, 4], "training": True})
    assert row.command(row.words("a b")) == "prb bench score 'a b' --responses 2 4 --training"
