"""A soak of kill -9: commands are killed at random moments and given again until they finish; nothing may differ.

python tests/soak.py [--kills 100] [--json results/soak/soak.json]      (`make soak`; tens of minutes)

Each scenario has a reference, made without interruption. Killed and repeated, it must end with the same bytes: of the
trained weights, of the packed tokens, of the comparison's scores, of the exported model. A command that ends by
itself must end with 0: a kill leaves nothing that blocks the next attempt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TINY = [
    "--num-layers",
    "1",
    "--hidden-size",
    "16",
    "--num-heads",
    "2",
    "--score-width",
    "4",
    "--train-length",
    "16",
    "--batch-size",
    "4",
]
EXPORT = """
import sys, torch
from dape.models import DapeForCausalLM, export, preset
torch.manual_seed(0)
model = DapeForCausalLM(preset("tiny", "dape1x3-kerple", num_hidden_layers=4, hidden_size=512, num_attention_heads=4))
for _ in range(4):
    export(model, sys.argv[1])
"""


@dataclass(frozen=True)
class Scenario:
    """words: the command for a folder; digest: of what it leaves there once it has ended by itself."""

    words: Callable[[Path], list[str]]
    digest: Callable[[Path], str]


def dape(*words: object) -> list[str]:
    return [sys.executable, "-m", "dape", *map(str, words)]


def digest_of(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def trained(folder: Path) -> str:
    steps = [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    if steps != list(range(1, len(steps) + 1)):
        return "a step is missing or twice"
    return digest_of(folder / "run" / "model" / "model.safetensors")


def packed(folder: Path) -> str:
    data = folder / "data"
    return digest_of(*sorted(p for p in data.rglob("*") if p.is_file() and p.name != ".verified.json"))


def compared(folder: Path) -> str:
    results = json.loads((folder / "compare" / "results.json").read_text())
    runs = [[run["method"], run["seed"], run["steps"], run["train_loss"]] for run in results["runs"]]
    # Rows of losses alone: times differ from run to run.
    rows = [
        [runs[row["run"]], row["eval_length"], row["value"]]
        for row in results["rows"]
        if row["metric"] == "loss"
    ]
    assert rows
    return hashlib.sha256(json.dumps(sorted(rows, key=str)).encode()).hexdigest()


def exported(folder: Path) -> str:
    from dape.checksums import verify_checksums

    verify_checksums(folder / "model")
    return digest_of(folder / "model" / "model.safetensors", folder / "model" / "config.json")


def scenarios(corpus: Path) -> dict[str, Scenario]:
    train = [*TINY, "--corpus", corpus, "--validation", "3.txt", "--checkpoint-every", 3, "--log-every", 1]
    compare = [
        *TINY,
        "--corpus",
        corpus,
        "--validation",
        "3.txt",
        "--methods",
        "kerple,dape-kerple",
        "--steps",
        20,
    ]
    compare += ["--checkpoint-every", 3, "--lengths", "16,32", "--windows", 8, "--no-equal-time"]
    return {
        "train": Scenario(lambda f: dape("train", *train, "--steps", 60, "--out", f / "run"), trained),
        "data": Scenario(
            lambda f: dape("data", "prepare", corpus, "--out", f / "data", "--tokenizer", "bpe:400"), packed
        ),
        "compare": Scenario(lambda f: dape("compare", *compare, "--out", f / "compare"), compared),
        "export": Scenario(lambda f: [sys.executable, "-c", EXPORT, str(f / "model")], exported),
    }


def attempt(words: list[str], patience: float | None) -> int:
    """The exit code, or -9 if it was killed after that many seconds, with every process that it had started."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, said = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return -signal.SIGKILL
    if process.returncode:
        print(f"ended with {process.returncode}: {said.decode(errors='replace')[-500:]}", file=sys.stderr)
    return process.returncode


def soak(scenario: Scenario, work: Path, kills: int, seconds: float, draw: random.Random) -> dict[str, int]:
    """Kill so many times, or for so long, over as many folders as it takes; what came of it."""
    start = time.monotonic()
    work.mkdir()
    assert attempt(scenario.words(work / "reference"), None) == 0
    usual, reference = time.monotonic() - start, scenario.digest(work / "reference")
    found = {"kills": 0, "finished": 0, "differing": 0, "failed": 0}
    rounds = 0

    def going_on() -> bool:
        return found["kills"] < kills and time.monotonic() - start < seconds

    while going_on() or rounds == 0:
        rounds += 1
        folder = work / f"round-{rounds}"
        folder.mkdir()
        while True:
            # A command that keeps getting killed early would never end, so patience reaches past its usual time.
            code = attempt(scenario.words(folder), draw.uniform(0.3, 1.2) * usual if going_on() else None)
            if code != -signal.SIGKILL:
                break
            found["kills"] += 1
        found["failed"] += code != 0
        if code == 0:
            found["finished"] += 1
            found["differing"] += scenario.digest(folder) != reference
        shutil.rmtree(folder)
    return {**found, "seconds": round(time.monotonic() - start)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="in all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--only", help="one scenario")
    parser.add_argument("--jobs", type=int, default=1, help="scenarios at a time")
    parser.add_argument("--minutes", type=float, default=600, help="stop killing after about so long")
    parser.add_argument("--json", type=Path, help="write the counts there")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="dape-soak-") as name, ThreadPoolExecutor(options.jobs) as pool:
        work = Path(name)
        corpus = work / "corpus"
        corpus.mkdir()
        draw = random.Random(options.seed)
        for number in range(8):
            words = [
                draw.choice(
                    ["the", "cat", "sat", "on", "a", "mat", "near", "some", "old", "house", "in", "town"]
                )
                for _ in range(6000)
            ]
            (corpus / f"{number}.txt").write_text(" ".join(words))
        every = scenarios(corpus)
        chosen = [options.only] if options.only else list(every)
        kills, seconds = options.kills // len(chosen), 60 * options.minutes * options.jobs / len(chosen)
        waiting = {
            scenario: pool.submit(
                soak,
                every[scenario],
                work / scenario,
                kills,
                seconds,
                random.Random(f"{options.seed}-{scenario}"),
            )
            for scenario in chosen
        }
        results, faults = {}, []
        for scenario, future in waiting.items():
            try:
                results[scenario] = future.result()
            except Exception as error:
                faults.append(f"{scenario}: {type(error).__name__}: {error}")
    print(*faults, sep="\n", file=sys.stderr)
    content = json.dumps(
        {"seed": options.seed, "kills": sum(r["kills"] for r in results.values()), **results}, indent=2
    )
    print(content)
    if options.json:
        from dape.files import write_atomically

        write_atomically(options.json, content + "\n")
    return int(bool(faults) or any(result["differing"] or result["failed"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
