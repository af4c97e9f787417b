"""Ctrl-C and SIGTERM as a request: the loop finishes its step, saves and returns."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, the first signal is noted in `reason`; a second one interrupts at once.

    Signals reach the main thread alone, so in another thread this does nothing.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in CAUGHT}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
