"""Two guards of what is on the disk: no run continued as another, no full disk taken for a crash."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

from dape.settings import changed
from dape.training.parallel import Parallel
from dape.training.settings import DiskFull, LoopSettings


def check_same_run(before: dict[str, Any], settings: LoopSettings) -> None:
    """Raise if a checkpoint's settings are those of another run."""
    if difference := changed(before, settings):
        name, old, new = difference
        raise ValueError(
            f"the run in this folder has {name}={old}, now {name}={new} is asked for: a run continues with "
            f"its own settings; give a new one another folder"
        )


@contextlib.contextmanager
def room_on_disk(step: int, saved: int, parallel: Parallel | None = None) -> Iterator[None]:
    """Turn a full disk into a sentence, in every process that takes part in the writing."""
    failure = None
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        failure = f"the disk is full at step {step}"
    failure = parallel.agree(failure) if parallel else failure
    if failure:
        kept = f"the checkpoint of step {saved} is intact" if saved > 0 else "there is no checkpoint yet"
        raise DiskFull(f"{failure}; {kept}: make room and give the same command again to continue")
