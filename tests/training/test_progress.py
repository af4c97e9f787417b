"""What is shown while training: a bar on a terminal, lines in a log."""

import io
import sys

from dape.training import display as progress
from dape.training.display import Display

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
