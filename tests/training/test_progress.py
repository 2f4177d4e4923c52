"""How training is shown: speeds without pauses, and lines where there is no terminal."""

import os
import signal

import pytest

from prb_jax.runs.progress import Speed, show_progress
from prb_jax.training.curves import _running_mean
from prb_jax.training.loop import MEAN_STEPS, Board, watch_signals


def test_the_line_says_all_there_is_to_say():
    now = [0.0]
    board = Board(1000, speed=Speed(lambda: now[0]))
    board.take({"step": 10, "loss": 0.7, "accuracy": 0.5, "margin": 0.1})
    now[0] += 1
    board.speed.count(steps=2, pairs=55, tokens=120e3)
    board.take({"step": 120, "loss": 0.6, "accuracy": 1.0, "mfu": 0.41})
    board.take({"step": 120, "validation_loss": 0.65, "validation_accuracy": 0.61})
    with show_progress("training", board, enabled=False) as display:
        lines = display.text().splitlines()
    assert lines == [
        "7:20 left, 120 of 1,000 steps (12%), loss 0.650, accuracy 0.75, margin 0.10,",
        "validation loss 0.650, validation accuracy 0.61, 55 pairs/s, 120k tokens/s,",
        "MFU 41%",
    ]


def test_means_are_of_the_last_steps_alone():
    board = Board(100)
    for step, value in enumerate([1.0, 0.0]):
        board.take({"step": step, "accuracy": value})
    assert "accuracy 0.50" in board.parts()
    for step in range(MEAN_STEPS):
        board.take({"step": step, "accuracy": 0.25})
    assert "accuracy 0.25" in board.parts()


def test_the_drawn_mean_does_not_run_behind():
    rising = [0.1 * n for n in range(400)]
    assert _running_mean(rising) == pytest.approx(rising)
    assert _running_mean([1.0, 0.0]) == [1.0, 0.0]
    noisy = _running_mean([n % 2 for n in range(401)])
    assert noisy[200] == pytest.approx(0.5, abs=0.05)
    assert _running_mean([]) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_a_wish_and_the_second_acts(number):
    seen: list[int] = []
    before = signal.signal(number, lambda n, frame: seen.append(n))
    try:
        with watch_signals() as interruption:
            assert interruption.reached(1) is None
            os.kill(os.getpid(), number)
            assert interruption.reached(2) == signal.Signals(number).name
            assert seen == []
            os.kill(os.getpid(), number)
            assert seen == [number]
        os.kill(os.getpid(), number)
        assert seen == [number, number]
    finally:
        signal.signal(number, before)
