"""The demonstration: a pretrained Llama that breaks past its 256 tokens, made to read longer inputs, against the alternatives.

  python results/stories15m/run.py train MODEL STORIES     # every arm that has no result yet; continues where it stopped
  python results/stories15m/run.py report                  # README.md and the figure, from the results beside this file

MODEL:   stories15M as a Hugging Face folder (karpathy/tinyllamas on the hub has the weights in llama2.c's format;
         transformers ships convert_llama_weights_to_hf for the layout), 15 million parameters, trained at 256 tokens.
STORIES: text that was neither trained on here nor sampled: stories of roneneldan/TinyStories, separated by
         <|endoftext|>, a newline between paragraphs.

Training text is sampled from the base itself (temperature 1), once for all arms.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import dape
from dape.data import Tokens
from dape.evaluation.by_length import WindowLosses, losses_of_windows
from dape.evaluation.evaluator import evaluating
from dape.evaluation.recall import recall_slices
from dape.evaluation.windows import same_targets
from dape.files import read_json, write_atomically
from dape.retrofitting.attach import adapter_parameters, retrofitted_layers, set_trainable
from dape.retrofitting.tuning import Tuning, sample
from dape.training.config import LoopSettings
from dape.training.loop import fit

HERE = Path(__file__).parent
LENGTH, TRAIN_LENGTH, LENGTHS = 256, 512, (256, 512, 1024, 2048, 4096)
WINDOWS, LAST = 16, 128
# Bounds of positions whose mean losses are kept.
POSITIONS = (0, 64, 128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
CHUNKS, ROWS = 13, 128

# Without a method: the base as it is. Trained arms: how they learn.
UNTRAINED = {
    "base": None,
    "base + PI": "rope[scaling=linear,factor=16]",
    "base + NTK": "rope[scaling=ntk,factor=16]",
    "base + YaRN": "rope[scaling=yarn,factor=16,original_length=256]",
}
MATCHED = ("dape1x3-kerple", "kerple", "dape-kerple", "fox")
# These keep the base's positions and so start as the base: they have nothing to match, and learn from the text alone.
ON_TEXT = {"trained on": None, "dape1x3-rope": "dape1x3"}
SETTINGS = LoopSettings(
    steps=600,
    learning_rate=2e-3,
    final_learning_rate=2e-5,
    warmup_steps=15,
    betas=(0.9, 0.98),
    weight_decay=0.0,
    clip=1.0,
    device="cpu",
    checkpoint_every=50,
)
TUNING: dict[str, Any] = {
    "train_length": TRAIN_LENGTH,
    "batch_size": 2,
    "added_rate": 3.0,
    "predicted_share": 0.25,
}
TEACHING: dict[str, Any] = {"match_steps": SETTINGS.steps, "teacher_length": LENGTH}
TEXT_RATE = 3e-4


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("train", "report"))
    parser.add_argument("model", nargs="?")
    parser.add_argument("stories", nargs="?", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/stories15m"), help="samples and checkpoints")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--only", help="arms, by commas")
    options = parser.parse_args()
    if options.action == "report":
        report(options.out)
        return 0
    if options.model is None or options.stories is None:
        parser.error("train needs MODEL and STORIES")
    text = story_tokens(options.stories, options.model)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    jobs = [(MATCHED[0], seeds[0]), *((name, 0) for name in UNTRAINED)]
    jobs += [(name, seed) for seed in seeds for name in (*MATCHED, *ON_TEXT)]
    only = None if options.only is None else options.only.split(",")
    for name, seed in jobs:
        path = options.out / f"{slug(name)}-seed{seed}.json"
        if path.exists() or (only is not None and name not in only):
            continue
        print(f"{time.strftime('%H:%M:%S')} {name}, seed {seed}", file=sys.stderr, flush=True)
        write_atomically(path, json.dumps(arm(name, seed, options, text), indent=None) + "\n")
    return 0


def slug(name: str) -> str:
    return name.replace(" + ", "-").replace(" ", "-").lower()


def load(model: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def arm(name: str, seed: int, options: argparse.Namespace, text: np.ndarray) -> dict[str, Any]:
    """One model, trained if it is to be, and its losses."""
    base, about = (
        load(options.model),
        {"arm": name, "seed": seed, "text": digest(text), "dape": dape.__version__},
    )
    if name in UNTRAINED:
        method = UNTRAINED[name]
        model = base if method is None else dape.retrofit(base, method)
        return about | {"method": method} | losses(model, text)
    torch.manual_seed(seed)
    settings = replace(SETTINGS, seed=seed)
    if name in MATCHED:
        method, taught = name, {**TEACHING, "teacher": load(options.model)}
    else:
        method, taught = ON_TEXT[name], {}
        settings = replace(settings, learning_rate=TEXT_RATE, final_learning_rate=TEXT_RATE / 100)
    if method is None:
        model = base
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(".self_attn." in parameter_name)
    else:
        model = dape.retrofit(base, method)
        set_trainable(model, "attention")
    task = Tuning(model, samples(options), seed=seed, **TUNING, **taught)
    result = fit(task, settings, options.work / f"{slug(name)}-seed{seed}", progress=False).complete()
    model.eval()
    return (
        about
        | {
            "method": method,
            "settings": asdict(settings) | TUNING | ({**TEACHING} if name in MATCHED else {}),
            "parameters": {
                "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
                "added": sum(p.numel() for p in adapter_parameters(model).values())
                if retrofitted_layers(model)
                else 0,
            },
            "tokens": result.tokens,
            "seconds": round(result.seconds),
            "loss": result.final_loss,
        }
        | losses(model, text)
    )


def samples(options: argparse.Namespace) -> np.ndarray:
    """Token ids that the base writes, sampled once for all arms, chunk by chunk."""
    folder = options.work / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    base = None
    for chunk in range(CHUNKS):
        path = folder / f"{chunk:03d}.npy"
        if not path.exists():
            base = base or load(options.model)
            rows = sample(base, ROWS, LENGTH, temperature=1.0, seed=1000 + chunk, batch_size=ROWS)
            np.save(path, rows.astype(np.int32))
    return np.concatenate([np.load(folder / f"{chunk:03d}.npy").reshape(-1) for chunk in range(CHUNKS)])


def story_tokens(path: Path, model: str) -> np.ndarray:
    """The stories end to end, each after the token that begins one, as the base was trained."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    stories = [story.strip() for story in path.read_text(encoding="utf-8").split("<|endoftext|>")]
    ids = [
        [tokenizer.bos_token_id, *tokenizer(story, add_special_tokens=False)["input_ids"]]
        for story in stories
        if story
    ]
    return np.concatenate(ids).astype(np.int32)


def digest(text: np.ndarray) -> dict[str, Any]:
    return {"tokens": len(text), "sha256": hashlib.sha256(text.tobytes()).hexdigest()[:16]}


def losses(model: PreTrainedModel, text: np.ndarray) -> dict[str, Any]:
    """Loss by length (the same targets at every length), by position, and by recall."""
    start, tokens = time.process_time(), Tokens.of([text])
    windows = same_targets(tokens, max(LENGTHS), LAST, WINDOWS, context="stream")
    with evaluating(model) as evaluator:
        everywhere = losses_of_windows(evaluator, tokens, windows, max(LENGTHS), max(LENGTHS), None)
        found = {n: losses_of_windows(evaluator, tokens, windows, n, LAST, None) for n in LENGTHS[:-1]}
    found[max(LENGTHS)] = everywhere[:, -LAST:]
    kept = WindowLosses(windows, LAST, found)
    between = itertools.pairwise(POSITIONS)
    return {
        "by_length": {str(n): [round(float(x), 5) for x in found[n].mean(1)] for n in LENGTHS},
        "by_position": {str(low): round(float(everywhere[:, low:high].mean()), 5) for low, high in between},
        "recall": recall_slices(tokens, kept).records(),
        "evaluation_cpu_seconds": round(time.process_time() - start),
    }


def report(folder: Path) -> None:
    """README.md and perplexity.svg, from the results."""
    from dape.lab.figures import length_figure, save

    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*-seed*.json")):
        result = read_json(path)
        _check_complete(path, result)
        found.setdefault(result["arm"], []).append(result)
    order = [name for name in (*UNTRAINED, *ON_TEXT, *reversed(MATCHED)) if name in found]
    base = found["base"][0]
    rows = [_row(name, found[name], base) for name in order]
    cut = f"{np.exp(np.mean(base['by_length'][str(LENGTH)])):.2f}"
    rows.insert(
        1, [f"base, input cut to its last {LENGTH}", *[cut] * len(LENGTHS), *["+0.0 %"] * 2, "–", "–"]
    )
    heads = [
        "",
        *map(str, LENGTHS),
        f"lost at {LENGTH}",
        f"change {LENGTH} → {max(LENGTHS)}",
        "seeds",
        "minutes",
    ]
    lines = {
        _label(name): [
            (n, float(np.exp(np.mean([r["by_length"][str(n)] for r in found[name]])))) for n in LENGTHS
        ]
        for name in order
    }
    save(length_figure(lines, "perplexity", unit=LENGTH), folder / "perplexity.svg")
    text = TEXT.format(
        windows=WINDOWS,
        last=LAST,
        tokens=f"{base['text']['tokens']:,}",
        sha=base["text"]["sha256"],
        sampled=f"{CHUNKS * ROWS * LENGTH:,}",
        sampled_plain=CHUNKS * ROWS * LENGTH,
        steps=SETTINGS.steps,
        batch=TUNING["batch_size"],
        train_length=TRAIN_LENGTH,
        rate=SETTINGS.learning_rate,
        added=TUNING["added_rate"],
        text_rate=TEXT_RATE,
        table=_table(heads, rows),
        verdict=_verdict(found, base),
        outlier=_without_worst(order, found, base),
        missing=_missing(found),
        positions=_table(
            ["", *(f"{low}–{high}" for low, high in itertools.pairwise(POSITIONS))],
            [
                [_label(name), *(f"{_mean(found[name], str(low)):.2f}" for low in POSITIONS[:-1])]
                for name in order
            ],
        ),
        recall=_table(
            ["", *(f"{slice_}, {n}" for slice_ in ("hit", "other") for n in (LENGTH, max(LENGTHS))), "new"],
            [[_label(name), *_recall(found[name])] for name in order],
        ),
    )
    write_atomically(folder / "README.md", text)


def _check_complete(path: Path, result: dict[str, Any]) -> None:
    if settings := result.get("settings"):
        planned = settings["steps"] * settings["batch_size"] * settings["train_length"]
        if result["tokens"] != planned:
            raise ValueError(
                f"{path}: trained on {result['tokens']:,} of {planned:,} tokens; remove it and run train again"
            )


def _label(name: str) -> str:
    return f"rope → {name}" if name in MATCHED else name


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _lost(results: list[dict[str, Any]], base: dict[str, Any]) -> float:
    """Share by which the perplexity at the base's own length exceeds the base's."""
    own, its = ([r["by_length"][str(LENGTH)] for r in rs] for rs in (results, [base]))
    return float(np.expm1(np.mean(own) - np.mean(its)))


def _grown(results: list[dict[str, Any]]) -> tuple[float, float]:
    """Change of the loss from the base's length to the longest, and its error over windows."""
    gaps = np.mean(
        [np.subtract(r["by_length"][str(max(LENGTHS))], r["by_length"][str(LENGTH)]) for r in results], 0
    )
    return float(gaps.mean()), float(gaps.std(ddof=1) / np.sqrt(len(gaps)))


def _row(name: str, results: list[dict[str, Any]], base: dict[str, Any]) -> list[str]:
    cells = [f"{np.exp(np.mean([r['by_length'][str(n)] for r in results])):.2f}" for n in LENGTHS]
    mean, error = _grown(results)
    minutes = np.mean([r["seconds"] for r in results]) / 60 if "seconds" in results[0] else 0.0
    return [
        _label(name),
        *cells,
        f"{100 * _lost(results, base):+.1f} %",
        f"{100 * np.expm1(mean):+.1f} % ({mean:+.3f} ± {error:.3f})",
        str(len(results)) if name not in UNTRAINED else "–",
        f"{minutes:.1f}" if minutes else "–",
    ]


def _mean(results: list[dict[str, Any]], low: str) -> float:
    return float(np.mean([r["by_position"][low] for r in results]))


def _recall(results: list[dict[str, Any]]) -> list[str]:
    def loss(name: str, length: int) -> str:
        values = [
            row["nll"]
            for r in results
            for row in r["recall"]
            if (row["slice"], row["eval_length"]) == (name, length)
        ]
        return f"{np.mean(values):.2f}" if values else "–"

    longest = max(LENGTHS)
    return [*(loss(name, n) for name in ("hit", "other") for n in (LENGTH, longest)), loss("new", longest)]


def _verdict(found: dict[str, list[dict[str, Any]]], base: dict[str, Any]) -> str:
    """Which arms reach the goal, from the numbers."""
    reached = [
        name
        for name in MATCHED
        if name in found and _lost(found[name], base) <= 0.03 and np.expm1(_grown(found[name])[0]) <= 0.01
    ]
    if reached:
        return f"Reached by: {', '.join(f'`{name}`' for name in reached)}."
    main = MATCHED[0]
    if main not in found:
        return "Not judged: the main arm has no result yet."
    return (
        f"Not reached by any arm: `{main}` loses {100 * _lost(found[main], base):.1f} % at {LENGTH} and changes by "
        f"{100 * np.expm1(_grown(found[main])[0]):+.1f} % to {max(LENGTHS)}."
    )


def _without_worst(order: list[str], found: dict[str, list[dict[str, Any]]], base: dict[str, Any]) -> str:
    """The window with the largest loss of the base, and perplexities without it."""
    own = base["by_length"][str(LENGTH)]
    worst = int(np.argmax(own))
    others = np.delete(np.arange(len(own)), worst)

    def perplexity(name: str, length: int) -> str:
        return f"{np.exp(np.mean([np.take(r['by_length'][str(length)], others) for r in found[name]])):.2f}"

    cells = ", ".join(
        f"{_label(name)} {perplexity(name, LENGTH)} and {perplexity(name, max(LENGTHS))}" for name in order
    )
    return (
        f"Window {worst} has a loss of {own[worst]:.2f} with the base, the next {sorted(own)[-2]:.2f}. Without it, at "
        f"{LENGTH} and {max(LENGTHS)} tokens: {cells}."
    )


def _missing(found: dict[str, list[dict[str, Any]]]) -> str:
    left = [
        f"{name} seed {seed}"
        for seed in (0, 1)
        for name in (*MATCHED, *ON_TEXT)
        if seed not in [r["seed"] for r in found.get(name, [])]
    ]
    return (
        f"Not run yet: {', '.join(left)}. `train` continues with them."
        if left
        else "Every trained arm has two seeds."
    )


TEXT = """# stories15M on longer inputs

Written by `python results/stories15m/run.py report` from the results beside it: do not edit.

A Llama of 15 million parameters that others trained at 256 tokens (stories15M of karpathy/tinyllamas, as a Hugging Face
folder). Its rotary positions are exchanged for others, and each attention layer learns what it gave before:
{steps} steps of {batch} × {train_length} tokens of text that the base wrote itself ({sampled} tokens, temperature 1, sampled once for
all), AdamW at {rate} (what is new {added:g} times as fast), attention layers alone. The base reads those windows as
overlapping ones of 256. Arms that keep the base's positions have nothing to match and learn the same text by its next
tokens at {text_rate}. PI, NTK and YaRN stretch by 16 without training; with training they were not run. Cutting the input
to the last 256 tokens costs nothing and needs no training, as the targets are the same: a retrofit reads the whole input in
one pass, but gains nothing from the rest.

Scored: the last {last} tokens of {windows} windows, the same at every length, of stories from roneneldan/TinyStories
({tokens} tokens, sha256 of the ids {sha}), one after the other. Neither training nor sampling has seen them; the
base may have, in its own training, as they are the first 200 kB of the train split, in a copy without marks between
stories; their boundaries were detected from the opening words. Learning rate, initial values of Kerple and layers matched in
place of next tokens were chosen after two pilots that looked at eight windows of the same text, the number of
steps after a run of 300 steps was evaluated on all of it (7.73 at 256, 7.78 at 4096). Perplexity, means over
seeds:

{table}

{outlier}

The same for any model: `dape retrofit MODEL --method dape1x3-kerple --corpus self --temperature 1 --sample-tokens {sampled_plain}
--trains attention --steps {steps} --match-steps {steps} --train-length {train_length} --batch-size {batch} --learning-rate {rate}
--final-learning-rate 2e-5 --warmup-steps 15 --betas 0.9 0.98 --weight-decay 0 --added-rate {added:g}`.

Minutes are those of the training's steps, on one thread of a machine that was busy with other work, pauses included. Goal: within 3 % of the base at 256, and at 4096 no more than 1 % above its own value at
256. {verdict} {missing}

![Perplexity by length](perplexity.svg)

## Loss by position
Of windows of 4096 tokens:

{positions}

## Loss by recall
Targets whose trigram has occurred before in the input (hit), at that length or new since 256, and the others:

{recall}
"""


if __name__ == "__main__":
    sys.exit(main())
