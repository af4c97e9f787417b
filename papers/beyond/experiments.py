"""Experiments that go on from DAPE V2, as lists of runs at three scales."""

from __future__ import annotations

from dataclasses import replace

from dape.lab.runs import Run
from papers.dape_v2.experiments import BIASES, LEAK, PLAIN, V2
from papers.experiment import LAPTOP, LONG, PAPER, SMOKE, Experiment, Scale

ROTATED = ("rope", "dape1x3-rope")
ALONE = {"bias_channels": False}
LINEAR = {"bias_channels": False, "negative_slope": 1.0}


def once(at: Scale, *trains: int) -> dict:
    """One training length at the laptop, 512 in the paper's setting."""
    return {"trains": {LAPTOP: trains or (128,), PAPER: (512,), SMOKE: at.trains}[at.name]}


def ingredients(at: Scale) -> list[Run]:
    """In the setting of the headline, whose trainings it shares."""
    own = LONG.with_(seeds=(0, 1)) if at.name == LAPTOP else at.with_(**once(at))
    runs = own(
        PLAIN, "keyconv1x3-kerple", V2, "dape-kerple", "talking-kerple", "mta-kerple", "fox", "dape1x3-fox"
    )
    runs += own(V2, label="{}[bias_channels=false,negative_slope=1.0]", score_options=LINEAR)
    runs += own(V2, label="{}[bias_channels=false]", score_options=ALONE)
    if at.name == LAPTOP:
        # A third seed, for a hypothesis that the first two suggested.
        runs += LONG(PLAIN, "dape-kerple", V2, seeds=(2,))
        runs += LONG(V2, label="{}[bias_channels=false]", seeds=(2,), score_options=ALONE)
        # Cheap ways to look one token back.
        runs += [*LONG("keyshift-kerple"), *LONG("kerple[canon=ac]", seeds=(0,))]
    return runs


def square_kernels(at: Scale) -> list[Run]:
    methods = (V2, "dape3x3-kerple", "dape1x9-kerple", PLAIN)
    runs = at(*methods, "dape3x1-kerple", **once(at))
    return runs + (at(*methods, trains=(64,)) if at.name == LAPTOP else [])


def depth(at: Scale) -> list[Run]:
    runs = at(V2, "dape1x5-kerple", **once(at, 64))
    return runs + [
        r
        for n in (3, 4)
        for r in at(V2, label=f"{{}}[depth={n}]", score_options={"depth": n}, **once(at, 64))
    ]


def randomized(at: Scale, *methods: str, read_in_order: bool = False, **changes) -> list[Run]:
    """Trained on positions below the longest input's, read with such positions or in order."""
    maximum = {SMOKE: 64, LAPTOP: 1024, PAPER: 8192}[at.name]
    label, evaluation = "{}, randomized", {"randomized_positions": maximum}
    if read_in_order:
        label, evaluation = "{}, randomized, read in order", {}
    return at(*methods, label=label, evaluation=evaluation, randomized_positions=maximum, **changes)


def randomized_positions(at: Scale) -> list[Run]:
    methods, own = (*ROTATED, PLAIN, V2), once(at, 64)
    in_order = randomized(at, *methods, read_in_order=True, **own)
    return at(*methods, **own) + randomized(at, *methods, **own) + in_order


def rope_scaling(at: Scale) -> list[Run]:
    """Trained unscaled, read with positions stretched by input length / training length."""
    read = [
        r
        for s in ("linear", "ntk", "yarn")
        for r in at(*ROTATED, label=f"{{}} read as {s}", evaluation={"rope_scaling": s})
    ]
    return at(*ROTATED, V2) + read


def longer_training(at: Scale) -> list[Run]:
    own = at.with_(train={"steps": 3 * at.train["steps"]}, **once(at, 64))
    if at.name == SMOKE:
        return own("rope", V2)
    leaks = own(*(f"dape1x3-{b}" for b in BIASES), label=LEAK, score_options={"leak_future": True})
    runs = own("rope", PLAIN, V2, "dape-rope", "cope", "alibi", "dape-kerple", "nope", "t5", "fire") + leaks
    if at.name == LAPTOP:
        runs += own(V2, "cope", "transformer-xl", "rope", corpora=("books",)) + randomized(own, "rope")
    return runs


def longer_windows(at: Scale) -> list[Run]:
    own = at.with_(train={"steps": 3 * at.train["steps"]})
    if at.name == PAPER:
        return own(V2, "rope", trains=(128, 256, 512, 1024, 2048, 4096), tokens=32768)
    if at.name == SMOKE:
        return own(V2, "rope", trains=(16, 32), lengths=(16, 32, 64), tokens=64)
    own = replace(own, lengths=(64, 128, 256, 512, 1024, 2048), tokens=2048)
    return own(V2, trains=(64, 256, 1024)) + own("rope", trains=(64, 1024))


EXPERIMENTS = [
    Experiment("ingredients", "takes DAPE V2 apart", "Ingredients of the convolution",
               "From plain Kerple to DAPE V2 one ingredient at a time, beside multi-token attention, talking heads and FoX.", ingredients),
    Experiment("square_kernels", "future work in § 3.3", "Square kernels", "Kernels over queries as well as keys.", square_kernels),
    Experiment("large_kernels", "goes on from § 4.7", "Kernels beyond seven", "Kernels 1x11 and 1x15 beside 1x3 and 1x7.",
               lambda at: at(*(("dape1x7-kerple", "dape1x11-kerple") if at.name != SMOKE else ()), "dape1x15-kerple", V2, **once(at))),
    Experiment("depth", "goes on from § 3.3", "Depth of the stack", "Two, three and four convolutions of 1x3, against two of 1x5.", depth),
    Experiment("randomized_positions", "positions of Ruoss et al. 2023", "Randomized positions",
               "Trained on positions drawn from a long range, read with such positions or in order.", randomized_positions),
    Experiment("rope_scaling", "Chen et al. 2023; Peng et al. 2023", "RoPE scaled at the evaluation",
               "RoPE with and without the convolution, trained unscaled and read stretched.", rope_scaling),
    Experiment("longer_training", "looks into §§ 1, 4.1, 4.4, 4.5, A, H", "Trained three times as long",
               "What did not show after 500 steps, after 1,500.", longer_training),
    Experiment("longer_windows", "looks into § 4.2", "The same tokens, trained three times as long",
               "Kernel 3 and RoPE on short and long windows with the same tokens a step.", longer_windows),
]  # fmt: skip
