"""`dape retrofit-demo`: a small Llama before and after retrofitting, in one table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from dape.cli.parsing import parse
from dape.files import write_atomically
from dape.lab.execute import execute
from dape.lab.experiments import Experiment, Workspace
from dape.lab.records import Results
from dape.lab.report import render
from dape.settings import check, setting

DESCRIPTION = """A small Llama trained at a short length, retrofitted, tuned at that length, tested at longer ones
(minutes on two cores). Three models, the same target bytes at every length:

  base                     the Llama as trained
  base, trained on         the same further steps without convolutions: the effect of tuning alone
  retrofitted, trained on  the same further steps with convolutions"""


@dataclass(frozen=True, kw_only=True)
class Options:
    out: Path = setting(
        Path("results/retrofit"), help="Folder of results.json and README.md.", writes="folder"
    )
    method: str = setting("dape1x3", help="Of the convolution.")
    steps: int = setting(500, help="Training steps of the base.", low=1, high=10**9)
    tune_steps: int = setting(200, help="Further steps, with and without convolutions.", low=1, high=10**9)
    train_length: int = setting(64, help="Bytes in a training window.", low=2, high=2**20)
    batch_size: int = setting(16, help="Windows in a step.", low=1, high=2**20)
    targets: int = setting(32, help="Predicted bytes at the end of each window.", low=1, high=2**20)
    windows: int = setting(64, help="Evaluation windows at each length.", low=2, high=10**6)
    seed: int = setting(0, help="Seed of weights and batches.", low=0, high=2**62)

    def __post_init__(self) -> None:
        check(self)
        if self.train_length < 2 * self.targets:
            raise ValueError(
                f"--train-length {self.train_length} is shorter than twice the {self.targets} target tokens"
            )


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape retrofit-demo", description=DESCRIPTION)
    check_method(options.method)
    settings = {name: value for name, value in asdict(options).items() if name != "out"}
    experiment = Experiment("retrofit", "retrofit", [], {"own": settings})
    (results,) = execute([experiment], Workspace(options.out), about={"command": "dape retrofit-demo"})
    write_atomically(options.out / "README.md", readme(results))
    from dape.lab.kinds.retrofit import table

    Console(highlight=False).print(table(results).rich())
    return 0


def check_method(method: str) -> None:
    """Raise before the base is trained if the method cannot be added to it."""
    from transformers import LlamaForCausalLM

    from dape.lab.kinds.retrofit import small_llama
    from dape.retrofitting import retrofit

    retrofit(LlamaForCausalLM(small_llama()), method)


def readme(results: Results) -> str:
    """README of the folder, from its results."""
    from dape.lab.kinds.retrofit import table

    about = results["environment"]
    machine = results.get("machine") or f"{about['cpu']}, {about['threads']} threads"
    versions = results.get("versions") or {name: about[name] for name in ("dape", "torch", "transformers")}
    return render(
        "retrofit.md.j2",
        settings=results.settings,
        parameters=results["parameters"],
        table=table(results),
        difference=results["largest change of loss by retrofitting before training"],
        seconds=results["seconds"],
        machine=machine,
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
    )
