"""Results as a comparison leaves them, made up: three methods, two seeds, two views, one failure."""

from __future__ import annotations

from dape.lab.records import Results

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


def sample_results() -> Results:
    found = Results({})
    for view, offset in (("equal-step", 0.0), ("equal-time", 0.03)):
        for seed in (0, 1):
            for place, (method, (start, slope)) in enumerate(METHODS.items()):
                rows = []
                for doublings, length in enumerate(LENGTHS):
                    nll = start + slope * doublings + offset * place / 4 + 0.004 * seed * (place - 1.5)
                    first, growth = METHODS["kerple"]
                    base = first + growth * doublings + offset * 2 / 4 + 0.002 * seed
                    error = 0.031 + 0.001 * doublings
                    rows.append({"metric": "loss", "eval_length": length, "value": nll, "error": error})
                    change = {"metric": "change", "eval_length": length, "against": str(TRAIN_LENGTH)}
                    error = 0.0005 + abs(slope) * 0.04 * doublings
                    rows.append({**change, "value": slope * doublings, "error": error})
                    if method != "kerple":
                        gap = {"metric": "difference", "eval_length": length, "against": "kerple"}
                        rows.append({**gap, "value": nll - base, "error": 0.008})
                equal = view == "equal-step"
                run = {"method": method, "seed": seed, "corpus": "stdlib", "train_length": TRAIN_LENGTH}
                run |= {"view": view, "steps": 1000 if equal else 1000 - 120 * place}
                seconds = 61.25 + 9.5 * place if equal else 61.0 + 0.125 * place
                found.add({**run, "train_seconds": seconds}, rows)
    about = {
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
    return Results({**about, "runs": found["runs"], "rows": found["rows"]})
