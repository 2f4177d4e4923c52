"""Progress: speeds, time left, lines for logs, a bar for terminals."""

import io

import pytest

from prb_jax.runs.progress import Meter, duration, progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_speed_and_time_left():
    clock = Clock()
    meter = Meter(total=1000, done=200, clock=clock)
    assert meter.line() == "200/1,000 pairs (20%)"
    for _ in range(4):
        clock.now += 2.5
        meter.advance(50, 25_000)
    # What was there before the start counts as done, not as speed.
    assert meter.rates() == (20.0, 10_000.0)
    assert meter.line() == "400/1,000 pairs (40%), 20 pairs/s, 10k tokens/s, 0:30 left"


def test_a_slow_first_batch_is_forgotten():
    clock = Clock()
    meter = Meter(total=10_000, done=0, clock=clock)
    clock.now += 300  # a compile
    meter.advance(10, 100)
    for _ in range(40):
        clock.now += 1
        meter.advance(10, 100)
    assert meter.rates()[0] == pytest.approx(10, rel=0.05)


def test_lines_for_a_log_file():
    stream = io.StringIO()
    with progress("m", total=100, stream=stream, seconds_between_lines=0) as advance:
        for _ in range(10):
            advance(10, 1)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "m: 0/100 pairs (0%)"
    assert lines[-1].startswith("m: 100/100 pairs (100%), ")

    stream = io.StringIO()
    with progress("m", total=100, stream=stream) as advance:
        for _ in range(10):
            advance(10, 1)
    assert len(stream.getvalue().splitlines()) == 2


def test_a_bar_for_a_terminal():
    stream = Terminal()
    with progress("[model]", total=100, done=50, stream=stream) as advance:
        advance(50, 1000)
    assert "[model]" in stream.getvalue()
    assert "100/100 pairs (100%)" in stream.getvalue()
    assert "tokens/s" in stream.getvalue()


def test_silence():
    stream = Terminal()
    with progress("m", total=2, stream=stream, enabled=False) as advance:
        advance(2, 2)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(4.6, "0:05"), (750, "12:30"), (3723, "1:02:03")])
def test_durations(seconds, text):
    assert duration(seconds) == text
