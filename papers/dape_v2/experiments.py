"""Tables and figures of DAPE V2 as lists of runs, at three scales.

`at(...)` calls make runs: methods, then changes of the scale (corpora, trains, seeds, lengths) or of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dape.lab.runs import Job, Run
from dape.lab.tasks import TaskRun
from dape.tasks import build_task
from papers.experiment import BOTH, LAPTOP, LONG, PAPER, SMOKE, Experiment, Scale
from papers.measure import Construction, Decoding, MapRun, StepTime

V2, DAPE, PLAIN = "dape1x3-kerple", "dape-kerple", "kerple"
BIASES = ("kerple", "alibi", "fire")
NINE = (PLAIN, V2, DAPE, "rope", "alibi", "nope", "fire", "t5", "cope")
LEAK = "{}[leak_future=true]"
# Source code: 4 layers, 128 × 16 tokens a step, 3,000 steps.
ON_CODE = LONG.with_(
    corpora=("python",), trains=(128,), windows=192,
    train={"num_layers": 4, "batch_size": 16, "steps": 3000, "learning_rate": 1.5e-3},
)  # fmt: skip


def headline(at: Scale) -> list[Run]:
    if at.name == SMOKE:
        return at(PLAIN, V2, trains=(32,), multiples=(1, 4)) + equal_time(
            at, {V2: 2}, trains=(32,), multiples=(1, 4)
        )
    if at.name == PAPER:
        changes = {"corpora": BOTH[PAPER], "trains": (512,), "seeds": (0, 1, 2), "lengths": at.lengths[2:]}
        return at(PLAIN, V2, DAPE, "rope", "fire", "alibi", **changes)
    # FIRE's threshold is half the training length, as the authors configure it.
    fire = LONG("fire", label="{}", position_options={"threshold": 128.0})
    return [
        *LONG(PLAIN, V2, DAPE, "rope", "alibi"), *fire, *equal_time(LONG, {V2: 3545}),
        *LONG(PLAIN, V2, DAPE, "rope", corpora=("books13",), seeds=(0, 1)),
    ]  # fmt: skip


def equal_time(at: Scale, steps: dict[str, int], **changes) -> list[Run]:
    """Methods with as many steps as fit into the time of those without a convolution, by interleaved timing."""
    return [
        replace(run.with_steps(n), label=f"{method}, equal time")
        for method, n in steps.items() for run in at(method, **changes)
    ]  # fmt: skip


def effect(at: Scale) -> list[Run]:
    runs = at(
        *(f"{p}{bias}" for bias in BIASES for p in ("", "dape1x3-", "dape-")),
        seeds=(0, 1) if at.name == LAPTOP else (0,),
    )
    steps = {V2: 460, "dape1x3-alibi": 464, "dape1x3-fire": 453}
    return runs + (equal_time(at, steps, trains=(64,)) if at.name == LAPTOP else [])


def code(at: Scale) -> list[Job]:
    """The headline on source code, with the ladder of ingredients: 6.1 million tokens in windows of 128."""
    if at.name != LAPTOP:
        return at(PLAIN, V2, trains=at.trains[:1])
    ladder = "nope rope alibi kerple fire keyconv1x3-kerple dape-kerple dape1x3-kerple dape1x3-nope keyshift-kerple"
    canon = ON_CODE("kerple[canon=ac]", seeds=(0,))
    return [*ON_CODE(*ladder.split()), *canon, Decoding(V2, label=f"{V2}, decoded")]


def code_rates(at: Scale) -> list[Run]:
    """Short runs of a seed that no other result uses: which learning rate suits which method."""
    if at.name != LAPTOP:
        return at(PLAIN, label="{}, learning rate 0.001", learning_rate=1e-3)
    short = ON_CODE.with_(seeds=(9,), windows=96, lengths=(128, 1024), train={"steps": 400})
    return [
        run for rate in (7.5e-4, 1.5e-3, 3e-3)
        for run in short("rope", PLAIN, DAPE, V2, label=f"{{}}, learning rate {rate:g}", learning_rate=rate)
    ]  # fmt: skip


def code_depth(at: Scale) -> list[Run]:
    """The same tokens and rate at other depths; four layers are in `code`."""
    if at.name != LAPTOP:
        return at(PLAIN, V2, label="{}, 2 layers", num_layers=2)
    return [
        run for n in (2, 8) for run in ON_CODE(PLAIN, V2, seeds=(0,), label=f"{{}}, {n} layers", num_layers=n)
    ]


def length_1024(at: Scale) -> list[Run]:
    """At the laptop 512 stands for 1024: the longest that is affordable with as many tokens a step."""
    methods = NINE[:8]
    if at.name == PAPER:
        return at(*methods, trains=(1024,), lengths=at.lengths[3:])
    if at.name == SMOKE:
        return at(PLAIN, V2, trains=(32,), multiples=(1, 2, 4, 8))
    return at(*methods, trains=(512,), multiples=(1, 2, 4, 8), batch_size=4)


def same_tokens(at: Scale) -> list[Run]:
    """As many tokens a step at every training length: 128 × 16 at the laptop, 128 × 32 × 8 in the paper."""
    if at.name == PAPER:
        return at(V2, "rope", corpora=BOTH[PAPER], trains=(128, 256, 512, 1024, 2048, 4096), tokens=32768)
    if at.name == SMOKE:
        return at(V2, "rope", trains=(16, 32), lengths=(16, 32, 64), tokens=64)
    trains = (64, 128, 256, 512, 1024)
    return at(V2, "rope", trains=trains, lengths=(*trains, 2048), tokens=2048)


def model_size(at: Scale) -> list[Run]:
    if at.name == PAPER:
        medium = at(*NINE[:8], label="{}, 350m", preset="350m", learning_rate=3e-4, final_learning_rate=3e-5)
        large = at("rope", "t5", PLAIN, DAPE, V2, label="{}, 2.7b", corpora=("books3",), trains=(512,), lengths=at.lengths[2:6],
                   preset="2.7b", learning_rate=1.6e-4, final_learning_rate=1.6e-5, distributed="fsdp")  # fmt: skip
        return medium + large
    if at.name == SMOKE:
        return at(PLAIN, V2, label="{}, 2 layers", num_layers=2)
    small = at.with_(trains=(64,), train={"steps": 200})
    four, six = (
        small(PLAIN, V2, DAPE, "rope", "t5", label=f"{{}}, {n} layers", num_layers=n) for n in (4, 6)
    )
    return four + six


def same_cost(at: Scale) -> list[Run]:
    widths = ((DAPE, 64, (0, 1, 2)), (V2, 21, (0, 1, 2)), (V2, 10, (0,)))
    return [
        run for method, width, seeds in widths
        for run in at(method, label=f"{{}}[width={width}]", seeds=seeds if at.name == LAPTOP else (0,), score_width=width)
    ]  # fmt: skip


# Five tasks are trained for 5,000 steps with three seeds (some six and a half hours of one core), the others briefly.
LONG_TASKS = ("missing_duplicate_string", "even_pairs", "reverse_string", "stack_manipulation", "bucket_sort")
SHORT_TASKS = {
    "modular_arithmetic": 1000, "parity_check": 1000, "cycle_navigation": 1000, "modular_arithmetic_brackets": 1000,
    "solve_equation": 1000, "compute_sqrt": 1000, "odds_first": 300, "binary_addition": 300, "duplicate_string": 150,
}  # fmt: skip
CHE_METHODS = [
    "rope",
    "relative",
    *(f"{p}{b}" for p in ("", "dape-", "dape1x3-") for b in ("alibi", "kerple", "fire")),
]


def on_task(task: str, methods: Sequence[str], seed: int = 0, label: str = "", **changes) -> list[Job]:
    """Runs of the methods on a generated task; changes: of its protocol."""
    own = replace(build_task(task).protocol, **changes)
    return [TaskRun(m, seed, task=task, protocol=own, label=label.format(m)) for m in methods]


def che(at: Scale) -> list[Job]:
    if at.name == SMOKE:
        tiny = {"steps": 2, "batch_size": 4, "samples": 4, "train_lengths": (4,), "test_lengths": (5, 6)}
        return on_task("even_pairs", (PLAIN, V2), **tiny)
    if at.name == PAPER:
        far = {"steps": 200_000, "batch_size": 128, "samples": 512, "test_lengths": tuple(range(41, 501))}
        return [run for task in (*LONG_TASKS, *SHORT_TASKS) for run in on_task(task, CHE_METHODS, **far)]
    runs, three = [], (PLAIN, DAPE, V2)
    far = {"steps": 5000, "samples": 256, "test_lengths": (41, 60, 80, 100, 200, 350, 500)}
    for seed in (0, 1, 2):
        for task in LONG_TASKS:
            runs += on_task(task, three, seed, batch_size=32, **far)
    for task, steps in SHORT_TASKS.items():
        few = {"samples": 64 if steps == 1000 else 32, "test_lengths": tuple(range(50, 501, 90))}
        runs += on_task(task, three, batch_size=32, steps=steps, **few)
    return runs


def recall(at: Scale) -> list[Job]:
    smoke = at.name == SMOKE
    changes = {"batch_size": 4, "samples": 4} if smoke else {}
    changes["steps"] = {SMOKE: 2, LAPTOP: 1000, PAPER: 20_000}[at.name]
    methods = [
        f"{p}{base}" for base in ("nope", "rope", PLAIN) for p in ("", "dape-", "dape1x2-", "dape1x3-")
    ]
    runs: list[Job] = [
        Construction(method, label=f"{method}, 1 layer", samples=16 if smoke else 512)
        for method in ("dape1x2-nope", "nope")
    ]
    for seed in (0,) if smoke else (0, 1, 2):
        for layers, label in ((1, "{}, 1 layer"), (2, "{}, 2 layers"))[: 1 if smoke else 2]:
            chosen = methods[:3:2] if smoke else methods
            runs += on_task("associative_recall", chosen, seed, label, num_layers=layers, **changes)
    return runs


def time_cost(at: Scale) -> list[StepTime]:
    rounds = {
        SMOKE: {"tiny": 1}, LAPTOP: {"tiny": 25, "125m": 5}, PAPER: {"350m": 20, "2.7b": 20, "6.7b": 20}
    }[at.name]  # fmt: skip
    smoke, length = at.name == SMOKE, 16 if at.name == SMOKE else 512
    methods = (PLAIN, V2) if smoke else ("rope", "t5", "alibi", PLAIN, "fire", DAPE, V2)
    base = (V2, str(length), "1")
    return [
        StepTime(m, size=size, length=length, rounds=n, base=base)
        for size, n in rounds.items()
        for m in methods
    ]


def step_time(at: Scale) -> list[StepTime]:
    size, tokens, lengths, rounds = {
        SMOKE: ("tiny", 32, (16, 32), 1), LAPTOP: ("tiny", 4096, (64, 256, 1024, 4096), 9), PAPER: ("125m", 8192, (128, 512, 2048, 8192), 20)
    }[at.name]  # fmt: skip
    base = (V2, str(lengths[0]), str(tokens // lengths[0]))
    methods = (V2, "rope") if at.name == SMOKE else (V2, DAPE, PLAIN, "rope")
    own = {"size": size, "rounds": rounds, "base": base}
    return [StepTime(m, length=n, batch=tokens // n, **own) for n in lengths for m in methods]


def visualisation(at: Scale) -> list[MapRun]:
    trains, lengths = ((128,), (128, 512, 2048)) if at.name == LAPTOP else ((512,), (512, 2048, 8192))
    runs, samples = at(V2, DAPE, PLAIN, trains=trains, seeds=(0, 1)) if at.name != SMOKE else at(V2, DAPE), 16
    if at.name == SMOKE:
        lengths, samples = (16, 64), 2
    return [
        MapRun(run.config, lengths, replace(run.evaluation, longest=None, last=1), corpus=run.corpus, samples=samples)
        for run in runs
    ]  # fmt: skip


EXPERIMENTS = [
    Experiment("headline", "§ 4.1, Figure 2", "Trained on eight million tokens",
               "Kernel 3 is best at every length, and perplexity falls beyond the training length.", headline),
    Experiment("code", "§ 4.1, Figure 2", "The same on source code", "Python files, trained at 128. The key shift, whose step takes as long, is level up to 512 tokens and behind by {lead code:code dape1x3-kerple keyshift-kerple 8192} nats at 8192. Decoded token by token, the shipped model has the same losses to {largest code decoded} nats: nothing leaks.", code),
    Experiment("code_rates", "§ 4.1", "Learning rates on source code", "Each method at three learning rates, before the long runs.", code_rates),
    Experiment("code_depth", "§ 4.1", "Source code at three depths", "As many tokens with 2, 4 and 8 layers.", code_depth),
    Experiment("baselines", "§ 4.1, Figure 2", "Nine methods, short trainings", "Kernel 3 is best on both corpora.",
               lambda at: at(*(NINE if at.name != SMOKE else (PLAIN, V2, "cope")), corpora=BOTH[at.name], seeds=(0, 1) if at.name == LAPTOP else (0,))),
    Experiment("nope_rope", "§ 3.2, Figure 1", "Without an additive bias", "Processing the scores helps NoPE; for RoPE it takes kernel 3.",
               lambda at: at("nope", "dape1x3-nope", "dape-nope", "rope", "dape1x3-rope", "dape-rope")),
    Experiment("effect", "§ 4.4, Figure 5", "Three additive biases", "Kernel 3 improves ALiBi, Kerple and FIRE, more than kernel 1.", effect),
    Experiment("same_tokens", "§ 4.2, Figure 3", "The same tokens in shorter windows", "With the convolution, short windows nearly suffice.", same_tokens),
    Experiment("step_time", "§ 4.2", "Time of a step by window length", "Windows 16 times as long: three times the step.", step_time, "ratio"),
    Experiment("model_size", "§ 4.3, Figure 4; Appendix B, Table 2", "Larger models", "It helps at 350M and 2.7B.", model_size),
    Experiment("leakage", "§ 4.5, Figure 6", "With information leakage", "Without the mask, perplexity is about 1.",
               lambda at: at(*(f"dape1x3-{b}" for b in BIASES), label=LEAK, trains=(512,) if at.name == PAPER else at.trains[:1], score_options={"leak_future": True})),
    Experiment("same_cost", "§ 4.6, Appendix C", "Kernels 1 and 3 at about the same cost", "A narrower kernel 3 is better than a wide kernel 1.", same_cost),
    Experiment("kernel_size", "§ 4.7, Appendix D, Tables 3, 4", "Kernel sizes", "Larger kernels help; the best varies.",
               lambda at: at(PLAIN, V2, DAPE, *(("dape1x7-kerple", "dape1x5-kerple") if at.name != SMOKE else ()), corpora=BOTH[at.name], seeds=(0, 1) if at.name == LAPTOP else (0,))),
    Experiment("che", "§ 4.8, Appendix E, Table 5", "CHE tasks", "Trained to length 40, tested to 500: the best kernel depends on the task.", che, "accuracy"),
    Experiment("time_cost", "§ 4.9, Appendix F, Table 6", "Time of a training step", "The larger the model, the less the convolution adds.", time_cost, "ratio"),
    Experiment("length_1024", "Appendix A, Table 1", "A longer training length", "The same order of methods, trained at 1024.", length_1024),
    Experiment("data_adaptive", "Appendix H, Table 8", "Data-adaptive encodings", "Of adaptive encodings, kernel 3 extrapolates best.",
               lambda at: at(V2, *((DAPE,) if at.name != SMOKE else ()), "transformer-xl", *(("cope",) if at.name != SMOKE else ()),
                             corpora=BOTH[at.name][-1:], trains=at.trains[:1] if at.name == PAPER else at.trains)),
    Experiment("visualisation", "Appendix I", "Attention maps", "Kernel 3 has the stronger attention sink.", visualisation, "sink_share"),
    Experiment("recall", "§ 3.3, Proposition 1", "Associative recall", "A convolution recalls, by construction and by training.", recall, "accuracy"),
]  # fmt: skip
