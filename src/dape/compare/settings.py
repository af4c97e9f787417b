"""What is compared: methods × seeds × lengths, and all of a training's options, which every method shares."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dape.methods import parse_method
from dape.settings import setting
from dape.training import TrainConfig, recipe

MULTIPLES = (1, 2, 4, 8, 16)
# May differ when a comparison is given again in the same folder: what is asked of it, not what a run computes.
FREE_WITHIN_A_FOLDER = {
    "methods",
    "seeds",
    "lengths",
    "baseline",
    "last",
    "windows",
    "context",
    "equal_time",
    "jobs",
    "out",
    "config",
    "method",
    "seed",
    "steps",
    "warmup_steps",
    "checkpoint_every",
    "keep_checkpoints",
    "log_every",
    "device",
    "data",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of a comparison."""

    methods: str = "rope,alibi,kerple,dape-kerple,dape1x3-kerple"
    """Separated by commas; `dape methods` lists them."""
    seeds: str = "0"
    """Separated by commas; each trains every method once more."""
    lengths: str | None = None
    """Tokens of input at which to evaluate, separated by commas; by default 1, 2, 4, 8 and 16 times the
    training length."""
    baseline: str | None = None
    """The method that others are compared with, token by token; kerple if it is there, else the first."""
    last: int | None = setting(
        None,
        help="Tokens predicted at the end of each window; by default 256, or the shortest length if that is less.",
        low=1,
        high=2**24,
    )
    windows: int = setting(128, help="Windows to evaluate, at most.", low=1, high=10**9)
    context: Literal["document", "stream"] = "document"
    """"stream" lets the context run on into earlier documents (for corpora of short ones)."""
    equal_time: bool = True
    """Also train every method for as long as the fastest took, with a schedule of that many steps."""
    jobs: int = setting(
        1,
        help="Runs at a time, each in a process of its own; the cores are divided among them.",
        low=1,
        high=1024,
    )
    out: str | None = "runs/compare"
    """The folder for runs, results and report."""
    config: str | None = None
    """A TOML, YAML or JSON file of the options of `dape train`; what is given here wins."""


# Fields of this order in --help: those above, then a training's.
@dataclass(frozen=True, kw_only=True)
class Comparison(TrainConfig, Asked):
    """All of `dape compare`: what is asked, and the options of a training, which every method shares."""

    out: str | None = "runs/compare"
    """The folder for runs, results and report; a comparison that is there is continued."""
    method: Annotated[str, tyro.conf.Suppress] = "kerple"
    seed: Annotated[int, tyro.conf.Suppress] = setting(0, help="", low=0, high=2**63 - 1)
    distributed: Annotated[Literal["none", "ddp", "fsdp"], tyro.conf.Suppress] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        for method in self.method_list:
            parse_method(method)
        self.check_lists()
        if self.baseline is not None and self.baseline not in self.method_list:
            raise ValueError(f'baseline="{self.baseline}" is not one of the methods {self.methods}')
        if self.out is None:
            raise ValueError("a comparison needs a folder: give --out")

    def check_lists(self) -> None:
        for name, values in (
            ("methods", self.method_list),
            ("seeds", self.seed_list),
            ("lengths", self.length_list),
        ):
            if not values:
                raise ValueError(f"{name} is empty: give at least one")
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={getattr(self, name)} names one of them twice")
        if min(self.length_list) < 1:
            raise ValueError(f"lengths={self.lengths}: a length is at least 1")
        if self.last is not None and not 1 <= self.last <= min(self.length_list):
            raise ValueError(
                f"last={self.last} must be from 1 to the shortest length, {min(self.length_list)}"
            )

    @property
    def method_list(self) -> list[str]:
        return [name.strip() for name in self.methods.split(",") if name.strip()]

    @property
    def seed_list(self) -> list[int]:
        return numbers("seeds", self.seeds)

    @property
    def length_list(self) -> list[int]:
        if self.lengths is None:
            return [multiple * self.train_length for multiple in MULTIPLES]
        return sorted(numbers("lengths", self.lengths))

    @property
    def baseline_method(self) -> str:
        return self.baseline or ("kerple" if "kerple" in self.method_list else self.method_list[0])

    @property
    def folder(self) -> Path:
        return Path(self.out or "").absolute()

    @property
    def evaluation(self) -> dict[str, Any]:
        """What evaluate_by_length is asked for."""
        return {
            "lengths": self.length_list,
            "last": self.last,
            "windows": self.windows,
            "context": self.context,
        }

    def training(self, steps: int) -> dict[str, Any]:
        """The fields of every run's TrainConfig, with the warm-up the same share of the steps."""
        share = self.warmup_steps / self.steps
        own = {
            name: value
            for name, value in asdict(self).items()
            if name in {f.name for f in fields(TrainConfig)}
        }
        warmup = self.warmup_steps if steps == self.steps else max(1, round(share * steps))
        return {**own, "data": self.data or str(self.folder / "data"), "warmup_steps": warmup}

    def fixed(self) -> dict[str, Any]:
        """What must stay the same in a folder."""
        return {name: value for name, value in asdict(self).items() if name not in FREE_WITHIN_A_FOLDER}

    def shown(self) -> dict[str, Any]:
        """For results.json and the report: lists as lists, nothing that has no effect here."""
        hidden = {
            "method",
            "seed",
            "distributed",
            "position_options",
            "score_options",
            "out",
            "data",
            "config",
        }
        rest = {
            name: value for name, value in asdict(self).items() if name not in hidden and value is not None
        }
        options = {
            name: value for name in ("position_options", "score_options") if (value := getattr(self, name))
        }
        first = {
            "methods": self.method_list,
            "baseline": self.baseline_method,
            "seeds": self.seed_list,
            "corpus": self.corpus,
            "train_length": self.train_length,
            "lengths": self.length_list,
            "steps": self.steps,
        }
        return {**first, **{name: value for name, value in rest.items() if name not in first}, **options}

    def command(self) -> str:
        """The command that makes this comparison: every option that is not the recipe's."""
        usual = by_recipe(self.preset, steps=self.steps)
        words = ["dape", "compare", "--steps", str(self.steps)]
        words += ["--preset", self.preset] if self.preset != Comparison.preset else []
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name not in ("preset", "steps") and value != getattr(usual, name):
                words += option(name.replace("_", "-"), value)
        return shlex.join(words)


def by_recipe(size: str, **changes: Any) -> Comparison:
    """A comparison of the usual methods with the recipe of a preset, with whatever is to be changed."""
    own = {field.name for field in fields(Asked)} | {"method", "seed", "distributed"}
    trained = {name: value for name, value in changes.items() if name not in own}
    recipe_of_size = {
        name: value for name, value in asdict(recipe(size, **trained)).items() if name not in own
    }
    return Comparison(**recipe_of_size, **{name: value for name, value in changes.items() if name in own})


def option(name: str, value: Any) -> list[str]:
    """An option as words of a command."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, dict):
        return [f"--{name.removesuffix('s')}", *(f"{key}={of}" for key, of in value.items())]
    if isinstance(value, tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


def numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f'{name}="{text}": expected whole numbers, separated by commas') from None
