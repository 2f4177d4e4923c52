"""How training is shown: speeds without pauses, and lines where there is no terminal."""

import io
import os
import signal

import pytest

from prb_jax.training.interruption import watch_signals
from prb_jax.training.progress import Board, Speed, show_training


def test_speed_counts_training_alone():
    now = [0.0]
    speed = Speed(clock=lambda: now[0])
    assert speed.rates() == (0, 0, 0, 0)
    now[0] = 60.0  # compiling
    speed.step(pairs=8, tokens=800, flops=1e6)
    for _ in range(4):
        now[0] += 0.5
        speed.step(pairs=8, tokens=800, flops=1e6)
    with speed.pause():
        now[0] += 100  # validation
    now[0] += 0.5
    speed.step(pairs=8, tokens=800, flops=1e6)
    assert speed.rates() == pytest.approx((2, 16, 1600, 2e6))


def test_the_line_says_all_there_is_to_say():
    board = Board(total=1000)
    board.update(10, {"loss": 0.7, "accuracy": 0.5, "margin": 0.1})
    board.update(
        120,
        {
            "loss": 0.6,
            "pairs_per_second": 55.0,
            "tokens_per_second": 120e3,
            "mfu": 0.41,
            "steps_per_second": 2.0,
        },
    )
    board.update(120, {"validation_loss": 0.65, "validation_accuracy": 0.61})
    line = board.line()
    for part in ("step 120/1,000", "loss 0.690", "accuracy 0.50", "validation 0.650 / 0.61", "55 pairs/s",
                 "120k tokens/s", "MFU 41%", "7:20 left"):  # fmt: skip
        assert part in line


def test_without_a_terminal_there_are_lines_and_with_progress_off_messages_only():
    stream = io.StringIO()
    with show_training(total=3, stream=stream, seconds_between_lines=0) as display:
        display.update(1, {"loss": 0.5})
        display.say("a message")
    lines = stream.getvalue().splitlines()
    assert lines == ["step 0/3 (compiling)", "step 1/3, loss 0.500", "a message"]
    quiet = io.StringIO()
    with show_training(total=3, stream=quiet, enabled=False) as display:
        display.update(1, {"loss": 0.5})
        display.say("a message")
    assert quiet.getvalue() == "a message\n"


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
