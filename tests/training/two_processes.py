"""What two processes run for test_distributed: every way of sharing, one after another in the same processes."""

import sys
from pathlib import Path

import toy

from dape.training import fit
from dape.training.parallel import processes

STEPS = 20
WAYS = {
    "ddp": {"distributed": "ddp", "accumulate": 2, "log_every": 5},
    "fsdp": {"distributed": "fsdp"},
}


def settings(way: str, **changes: object):
    return toy.settings(steps=STEPS, checkpoint_every=8, **{**WAYS[way], **changes})


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with processes(settings("ddp")):
        for way in WAYS:
            fit(toy.task(toy.decoder()), settings(way), folder / way / "two", progress=False)
            fit(toy.task(toy.decoder()), settings(way), folder / way / "one-then-two", progress=False)
        # An encoding with parameters of a single number.
        fire = toy.task(toy.decoder("dape1x3-fire"))
        fit(fire, settings("fsdp"), folder / "fire", progress=False)
