"""Progress: speeds, time left, lines for logs, a live text for terminals, words while programs are compiled."""

import io
import re

import pytest

import prb_jax as prb
from prb_jax.runs.progress import WIDTH, Count, Speed, compiling, duration, show_progress
from tests.scoring.records import record, write_model


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_speed_and_time_left():
    clock = Clock()
    count = Count(total=1000, done=200, speed=Speed(clock))
    assert count.parts() == ["200 of 1,000 pairs (20%)"]
    for _ in range(4):
        clock.now += 2.5
        count.advance(50, 25_000)
    # What was there before the start counts as done, not as speed.
    assert (count.speed.rate("pairs"), count.speed.rate("tokens")) == (20.0, 10_000.0)
    assert count.parts() == ["0:30 left", "400 of 1,000 pairs (40%)", "20 pairs/s", "10k tokens/s"]


def test_a_slow_first_batch_is_forgotten():
    clock = Clock()
    count = Count(10_000, speed=Speed(clock))
    clock.now += 300
    count.advance(10, 100)
    for _ in range(40):
        clock.now += 1
        count.advance(10, 100)
    assert count.speed.rate("pairs") == pytest.approx(10, rel=0.05)


def test_speed_counts_no_pauses():
    clock = Clock()
    speed = Speed(clock)
    assert speed.rate("pairs") == 0
    with speed.pause():
        clock.now += 60
    for _ in range(4):
        clock.now += 0.5
        speed.count(steps=1, pairs=8)
    with speed.pause():
        clock.now += 50
        with speed.pause():
            clock.now += 50
    clock.now += 0.5
    speed.count(steps=1, pairs=8)
    assert (speed.rate("steps"), speed.rate("pairs")) == pytest.approx((2, 16))


def test_lines_for_a_log_file():
    for options, count in (({"seconds_between_lines": 0}, 11), ({}, 2)):
        stream = io.StringIO()
        with show_progress("m", Count(100), stream=stream, **options) as display:
            for _ in range(10):
                display.advance(10, 1)
        lines = stream.getvalue().splitlines()
        assert len(lines) == count
        assert lines[0] == "m: 0 of 100 pairs (0%)"
        assert lines[-1].startswith("0:00 left, 100 of 100 pairs (100%), ")


def test_a_live_text_for_a_terminal():
    stream = Terminal()
    with show_progress("[model]", Count(100, 50), stream=stream) as display:
        display.say("a message [x]")
        display.advance(50, 1000)
    for text in ("[model]", "a message [x]", "100 of 100 pairs (100%)", "tokens/s"):
        assert text in stream.getvalue()
    stream = Terminal()
    with show_progress("m", Count(2), stream=stream, enabled=False) as display:
        display.advance(2, 2)
    assert stream.getvalue() == ""


def test_durations():
    assert [duration(seconds) for seconds in (4.6, 750, 3723)] == ["0:05", "12:30", "1:02:03"]


def test_lines_are_folded_between_figures():
    class Many(Count):
        def parts(self):
            return [f"figure {n} of many" for n in range(9)]

    with show_progress("m", Many(1), enabled=False) as display:
        lines = display.text().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert ", ".join(line.rstrip(",") for line in lines) == ", ".join(Many(1).parts())
    assert [line.endswith(",") for line in lines] == [True] * (len(lines) - 1) + [False]


def test_compiling_is_said_once_for_each_shape():
    stream, clock = io.StringIO(), Clock()
    count = Count(9, speed=Speed(clock))

    def program():
        clock.now += 60

    with show_progress("m", count, stream=stream) as display:
        for shape in (1, 2):
            with compiling(program, shape):
                program()
            with compiling(program, shape):
                pass
            display.update(now=True)
        clock.now += 1
        display.advance(1)
    lines = stream.getvalue().splitlines()
    assert lines.count("0 of 9 pairs (0%), compiling") == 2
    assert lines[-1] == "0:08 left, 1 of 9 pairs (11%), 1 pairs/s"


def test_scoring_says_that_it_compiles(tmp_path, monkeypatch):
    """On a terminal too, in 80 columns, with the time left first."""
    model = prb.load(write_model(tmp_path / "model", "qwen3"))
    items = [
        prb.Comparison(id=n, question="Tea?", chosen=record(n).question, rejected="No.") for n in range(20)
    ]
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    prb.evaluate(model, items, out=tmp_path / "run", controls="none")
    lines = stream.getvalue().splitlines()
    assert any(re.fullmatch(r"0 of 20 pairs \(0%\), compiling", line) for line in lines[1:])
    assert re.match(r"0:00 left, 20 of 20 pairs \(100%\), ", lines[-1])
    again = Terminal()
    monkeypatch.setattr("sys.stderr", again)
    prb.evaluate(model, items, out=tmp_path / "again", controls="none")
    assert "compiling" not in again.getvalue()  # the programs are there
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", again.getvalue())
    assert max(len(line) for line in re.split(r"[\r\n]", plain)) <= 80
    assert re.search(r"^0:00 left, 20 of 20 pairs", plain, re.MULTILINE)
