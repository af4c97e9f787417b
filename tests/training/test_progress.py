"""What is shown while training: a bar on a terminal, lines in a log."""

from __future__ import annotations

import io
import sys

import pytest

from dape.training import display as progress
from dape.training.display import Display, clock, short

START = {"step": 0, "tokens": 0, "seconds": 0.0}
RECORDS = [
    {"step": 10, "loss": 3.0, "tokens": 10_000, "seconds": 1.0},
    {"step": 20, "loss": 2.5, "tokens": 20_000, "seconds": 2.0},
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_loss_speed_and_time_left(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    display = Display(100, START, wanted=True)
    for record in RECORDS:
        display.show(record)
    display.say("a sentence")
    display.close()
    shown = sys.stderr.getvalue()
    assert "20/100" in shown
    assert "loss 2.500  10.0k tokens/s  0:08 left" in shown
    assert "a sentence" in shown


def test_a_log_gets_lines_now_and_then_and_one_at_the_end(monkeypatch, capsys):
    display = Display(30, START, wanted=True)
    display.show(RECORDS[0])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    display.show(RECORDS[1])
    assert capsys.readouterr().err == "step 20/30  loss 2.500  10.0k tokens/s  0:01 left\n"


@pytest.mark.parametrize(("number", "text"), [(850, "850"), (8500, "8.5k"), (1.2e6, "1.2M"), (3e9, "3.0G")])
def test_numbers_are_short(number, text):
    assert short(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(42, "0:42"), (725, "12:05"), (11_400, "3:10:00")])
def test_times_are_clocks(seconds, text):
    assert clock(seconds) == text
