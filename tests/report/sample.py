"""Results as a comparison leaves them, made up: three methods, two seeds, two views, one failure."""

from __future__ import annotations

import math
from typing import Any

TRAIN_LENGTH = 64
LENGTHS = (64, 128, 256, 512, 1024)
# Loss at the training length, and its change for each doubling.
METHODS = {
    "rope": (1.48, 0.41),
    "alibi": (1.61, 0.002),
    "kerple": (1.55, 0.006),
    "dape-kerple": (1.511, 0.0005),
    "dape1x3-kerple": (1.4609, -0.0007),
}


def sample_results() -> dict[str, Any]:
    records, pairs, changes = [], [], []
    for view, offset in (("equal-step", 0.0), ("equal-time", 0.03)):
        for seed in (0, 1):
            for place, (method, (start, slope)) in enumerate(METHODS.items()):
                for doublings, length in enumerate(LENGTHS):
                    nll = start + slope * doublings + offset * place / 4 + 0.004 * seed * (place - 1.5)
                    base = (
                        METHODS["kerple"][0]
                        + METHODS["kerple"][1] * doublings
                        + offset * 2 / 4
                        + 0.002 * seed
                    )
                    records.append(
                        {
                            "method": method,
                            "seed": seed,
                            "view": view,
                            "steps": 1000 if view == "equal-step" else 1000 - 120 * place,
                            "train_seconds": 61.25 + 9.5 * place
                            if view == "equal-step"
                            else 61.0 + 0.125 * place,
                            "train_length": TRAIN_LENGTH,
                            "eval_length": length,
                            "nll": nll,
                            "nll_se": 0.031 + 0.001 * doublings,
                            "ppl": math.exp(nll),
                            "tokens": 4096,
                        }
                    )
                    changes.append(
                        {
                            "view": view,
                            "method": method,
                            "seed": seed,
                            "from_length": TRAIN_LENGTH,
                            "eval_length": length,
                            "change": slope * doublings,
                            "change_se": 0.0005 + abs(slope) * 0.04 * doublings,
                        }
                    )
                    if method != "kerple":
                        pairs.append(
                            {
                                "view": view,
                                "method": method,
                                "baseline": "kerple",
                                "seed": seed,
                                "eval_length": length,
                                "difference": nll - base,
                                "difference_se": 0.008,
                            }
                        )
    return {
        "settings": {
            "methods": [*METHODS, "fire"],
            "seeds": [0, 1],
            "lengths": list(LENGTHS),
            "baseline": "kerple",
            "corpus": "stdlib",
            "train_length": TRAIN_LENGTH,
            "batch_size": 16,
            "steps": 1000,
        },
        "environment": {
            "python": "3.11.2",
            "torch": "2.13.0",
            "cpu": "A processor <with> 2 cores",
            "threads": 2,
        },
        "command": "dape compare --methods rope,alibi,kerple,dape-kerple,dape1x3-kerple,fire --seeds 0,1",
        "records": records,
        "pairs": pairs,
        "changes": changes,
        "failures": [
            {
                "method": "fire",
                "seed": seed,
                "view": "equal-step",
                "error": "the loss is <nan> at step 12 </script>",
            }
            for seed in (0, 1)
        ],
    }
