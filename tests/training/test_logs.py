"""Metrics in lines, in TensorBoard's files, and as a picture."""

import sys

import pytest

from prb_jax.errors import RunError
from prb_jax.training.config import LogSettings, TrainSettings
from prb_jax.training.curves import plot_curves
from prb_jax.training.events import EventFile
from prb_jax.training.logs import MetricsLog, read_metrics
from tests.json_lines import read_lines, write_lines

PLAIN = TrainSettings(log=LogSettings(tensorboard=False))


def test_rows_are_whole_lines_and_a_restart_drops_what_comes_again(tmp_path):
    log = MetricsLog(tmp_path, step=0, settings=PLAIN)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1 / step})
    log.write({"step": 2, "validation_loss": 0.5})
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # a kill in the middle of a line
    log = MetricsLog(tmp_path, step=2, settings=PLAIN)
    log.write({"step": 3, "loss": 7.0})
    log.close()
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert rows == log.rows
    assert [(row["step"], row.get("loss")) for row in rows] == [(1, 1.0), (2, 0.5), (2, None), (3, 7.0)]


def test_a_line_that_is_no_row_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1}\n{"loss": 2}\n')
    with pytest.raises(RunError, match=r"metrics.jsonl:2: not a row of metrics"):
        read_metrics(path)
    for value in ('""', '"x"', "null", "[1]", "true"):
        path.write_text(f'{{"step": 1, "loss": 1}}\n{{"step": 2, "loss": 1, "margin": {value}}}\n')
        with pytest.raises(RunError, match=r"metrics.jsonl:2: field 'margin': expected a number, found"):
            read_metrics(path)
    assert read_metrics(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((1, 2, 4, 5), "the rows of steps 3 to 3 are missing"),
        ((3, 4, 5), "the rows of steps 1 to 2 are missing"),
        ((1, 2), "the rows of steps 3 to 5 are missing"),
        ((), "the rows of steps 1 to 5 are missing"),
        ((1, 2, 2, 3, 4, 5), r"metrics\.jsonl:3: a second row of step 2"),
    ],
)
def test_steps_that_are_missing_are_named_when_a_run_is_continued(tmp_path, steps, message):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [{"step": step, "loss": 1.0} for step in steps])
    before = path.read_bytes()
    with pytest.raises(RunError, match=message):
        MetricsLog(tmp_path, step=5, settings=PLAIN)
    assert path.read_bytes() == before


def test_wandb_that_is_not_installed_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = TrainSettings(log=LogSettings(tensorboard=False, wandb="project"))
    with pytest.raises(RunError, match="wandb is not installed"):
        MetricsLog(tmp_path, step=0, settings=settings)


def test_tensorboard_reads_what_was_written(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file = EventFile(tmp_path)
    for step in range(1, 6):
        file.write(step, {"train/loss": 1 / step, "train/accuracy": 0.5})  # not closed: a kill loses nothing
    again = EventFile(tmp_path, first_step=4)  # continued from the checkpoint of step 3
    again.write(4, {"train/loss": 9.0})
    again.close()
    assert len(list(tmp_path.iterdir())) == 2
    shown = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert set(shown.Tags()["scalars"]) == {"train/loss", "train/accuracy"}
    points = [(point.step, point.value) for point in shown.Scalars("train/loss")]
    assert points == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 9.0)]


def test_curves_are_drawn_or_an_error_says_what_to_install(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    rows = [{"step": s, "loss": 0.7 - s / 100, "accuracy": 0.5, "margin": 0.1} for s in range(1, 30)]
    rows.append({"step": 20, "validation_loss": 0.6, "validation_accuracy": 0.6, "validation_margin": 0.2})
    path = tmp_path / "curves.png"
    plot_curves(rows, path, title="a run")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [item.name for item in tmp_path.iterdir()] == ["curves.png"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RunError, match=r"needs matplotlib.*pip install 'prb-jax\[report\]'"):
        plot_curves([], path, title="a run")
