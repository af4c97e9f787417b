"""The demonstration: a pretrained Llama that breaks past its 256 tokens, repaired in minutes, against the alternatives.

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
from dape.evaluate.by_length import WindowLosses, token_losses
from dape.evaluate.recall import recall_slices
from dape.evaluate.scoring import scoring
from dape.evaluate.windows import same_targets
from dape.files import write_atomically
from dape.retrofitting.attach import adapter_parameters, retrofitted_layers, set_trainable
from dape.retrofitting.tuning import Tuning, sample
from dape.training.loop import fit
from dape.training.settings import LoopSettings

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
    steps=300,
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
    before = time.process_time()
    result = fit(task, settings, options.work / f"{slug(name)}-seed{seed}", progress=False)
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
            "cpu_seconds": round(time.process_time() - before),
            "loss": result.last_loss,
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
    with scoring(model) as scorer:
        everywhere = token_losses(scorer, tokens, windows, max(LENGTHS), max(LENGTHS), None)
        found = {n: token_losses(scorer, tokens, windows, n, LAST, None) for n in LENGTHS[:-1]}
    found[max(LENGTHS)] = everywhere[:, -LAST:]
    scores = WindowLosses(windows, LAST, found)
    between = itertools.pairwise(POSITIONS)
    return {
        "by_length": {str(n): [round(float(x), 5) for x in found[n].mean(1)] for n in LENGTHS},
        "by_position": {str(low): round(float(everywhere[:, low:high].mean()), 5) for low, high in between},
        "recall": recall_slices(tokens, scores).records(),
        "evaluation_cpu_seconds": round(time.process_time() - start),
    }


def report(folder: Path) -> None:
    raise NotImplementedError


if __name__ == "__main__":
    sys.exit(main())
