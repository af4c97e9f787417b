"""A soak of kill -9: commands are killed at random moments and given again until they finish; nothing may differ.

python tests/soak.py [--kills 100] [--json results/soak/soak.json]      (`make soak`; tens of minutes)

Each scenario has a reference, made without interruption. Killed and repeated, it must end with the same bytes: of the
trained weights, of the packed tokens, of the comparison's scores, of the exported model. A command that ends by
itself must end with 0: a kill leaves nothing that blocks the next attempt, and no half-written file after it.
"""

import argparse
import contextlib
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
from dataclasses import dataclass
from pathlib import Path

SIZES = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "score_width": 4, "train_length": 16}
TINY = SIZES | {"batch_size": 4, "validation": "3.txt", "checkpoint_every": 3}
EXPORT = """
import sys, torch
from dape.models import DapeForCausalLM, export, preset
torch.manual_seed(0)
model = DapeForCausalLM(preset("tiny", "dape1x3-kerple", num_hidden_layers=4, hidden_size=512, num_attention_heads=4))
for _ in range(4):
    export(model, sys.argv[1])
"""
COMPARE = """
import json, sys, dape
dape.compare(out=sys.argv[1], **json.loads(sys.argv[2]))
"""


@dataclass(frozen=True)
class Scenario:
    """words: the command for a folder; digest: of what it leaves there once it has ended by itself.

    workers: kill one of its worker processes in place of the command, which then reports a failed run.
    """

    words: Callable[[Path], list[str]]
    digest: Callable[[Path], str]
    workers: bool = False


def dape(*words: object) -> list[str]:
    return [sys.executable, "-m", "dape", *map(str, words)]


def words(options: dict[str, object]) -> list[str]:
    """Options as a command takes them."""
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def digest_of(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def leftovers(folder: Path) -> list[Path]:
    """Files that interrupted writers left and nobody has swept."""
    return [path for path in folder.rglob("*") if "writing" in path.name and path.name.startswith(".")]


def trained(folder: Path) -> str:
    steps = [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    if steps != list(range(1, len(steps) + 1)):
        return "a step is missing or twice"
    return digest_of(folder / "run" / "model" / "model.safetensors")


def packed(folder: Path) -> str:
    data = folder / "data"
    return digest_of(*sorted(p for p in data.rglob("*") if p.is_file() and p.name != ".verified.json"))


def compared(folder: Path) -> str:
    from dape.evaluation.table import read_table

    rows = read_table(folder / "compare" / "results.csv.gz")
    # Times differ from run to run.
    return hashlib.sha256(rows[rows["metric"].isin(["loss", "train_loss"])].to_csv().encode()).hexdigest()


def exported(folder: Path) -> str:
    from dape.checksums import verify_checksums

    verify_checksums(folder / "model")
    return digest_of(folder / "model" / "model.safetensors", folder / "model" / "config.json")


def scenarios(corpus: Path) -> dict[str, Scenario]:
    tiny = TINY | {"corpus": str(corpus)}
    compare = tiny | {"methods": "kerple,dape-kerple", "steps": 20, "lengths": "16,32", "windows": 8}
    python = json.dumps(compare | {"equal_time": False})
    swept = {name: value for name, value in compare.items() if name != "methods"} | {"methods": "kerple"}
    sweep = [*words(swept), "--jobs", "2", "--over", "learning_rate=1e-3,2e-3"]
    train = words(tiny | {"log_every": 1, "steps": 60})
    return {
        "train": Scenario(lambda f: dape("train", *train, "--out", f / "run"), trained),
        "data": Scenario(
            lambda f: dape("data", "prepare", corpus, "--out", f / "data", "--tokenizer", "bpe:400"), packed
        ),
        "compare": Scenario(
            lambda f: dape("compare", *words(compare), "--no-equal-time", "--out", f / "compare"), compared
        ),
        # The same in one process, as a notebook does it: the kills fall into the training and the evaluation.
        "compare in Python": Scenario(
            lambda f: [sys.executable, "-c", COMPARE, str(f / "compare"), python], compared
        ),
        "sweep": Scenario(lambda f: dape("sweep", *sweep, "--out", f / "compare"), compared),
        "workers": Scenario(lambda f: dape("sweep", *sweep, "--out", f / "compare"), compared, workers=True),
        "export": Scenario(lambda f: [sys.executable, "-c", EXPORT, str(f / "model")], exported),
    }


def workers_of(parent: int) -> list[int]:
    """Processes that run a job for that one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(status[1]) == parent and b"run_job" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def attempt(words: list[str], patience: float | None, *, workers: bool = False) -> int:
    """The exit code, or -9 if it was killed after that many seconds with its group, or one of its workers was."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, start_new_session=True, **streams)
    try:
        _, said = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        victims = workers_of(process.pid) if workers else []
        if victims:
            os.kill(victims[0], signal.SIGKILL)
        elif not workers:
            os.killpg(process.pid, signal.SIGKILL)
        _, said = process.communicate()
        if not workers or (victims and process.returncode == 1):
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
    found = {"kills": 0, "finished": 0, "differing": 0, "failed": 0, "leftovers": 0}
    rounds = 0

    def going_on() -> bool:
        return found["kills"] < kills and time.monotonic() - start < seconds

    while going_on() or rounds == 0:
        rounds += 1
        folder = work / f"round-{rounds}"
        folder.mkdir()
        while True:
            # A command that keeps getting killed early would never end, so patience reaches past its usual time.
            patience = draw.uniform(0.3, 1.2) * usual if going_on() else None
            code = attempt(scenario.words(folder), patience, workers=scenario.workers)
            if code != -signal.SIGKILL:
                break
            found["kills"] += 1
        found["failed"] += code != 0
        if code == 0:
            found["finished"] += 1
            found["differing"] += scenario.digest(folder) != reference
            found["leftovers"] += len(leftovers(folder))
        shutil.rmtree(folder)
    return {**found, "seconds": round(time.monotonic() - start)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="in all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--minutes", type=float, default=600, help="stop killing after about so long")
    parser.add_argument("--json", type=Path, help="write the counts there")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results, faults = {}, []
    with tempfile.TemporaryDirectory(prefix="dape-soak-") as name:
        work = Path(name)
        corpus = work / "corpus"
        corpus.mkdir()
        draw = random.Random(options.seed)
        vocabulary = ["the", "cat", "sat", "on", "a", "mat", "near", "some", "old", "house", "in", "town"]
        for number in range(8):
            (corpus / f"{number}.txt").write_text(" ".join(draw.choices(vocabulary, k=6000)))
        every = scenarios(corpus)
        kills, seconds = options.kills // len(every), 60 * options.minutes / len(every)
        for title, scenario in every.items():
            moments = random.Random(f"{options.seed}-{title}")
            try:
                results[title] = soak(scenario, work / title, kills, seconds, moments)
            except Exception as error:
                faults.append(f"{title}: {type(error).__name__}: {error}")
            print(title, results.get(title, faults[-1:]), flush=True)
    if options.json:
        from dape.files import write_atomically

        content = {"seed": options.seed, "kills": sum(r["kills"] for r in results.values()), **results}
        write_atomically(options.json, json.dumps(content, indent=2) + "\n")
    bad = ("differing", "failed", "leftovers")
    return int(bool(faults) or any(result[name] for result in results.values() for name in bad))


if __name__ == "__main__":
    sys.exit(main())
