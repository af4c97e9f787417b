"""Kinds of runs that only the papers have: the proposition, times of a step, attention weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from dape.bench.timing import take_turns
from dape.bench.train import Options, training_step
from dape.data import find_corpus, load_tokenizer
from dape.data.python_corpus import HELD_OUT
from dape.evaluation.table import make_table
from dape.evaluation.windows import same_targets
from dape.inspection import inspect
from dape.lab.runs import Job, Run, digest
from dape.lab.solving import TESTING
from dape.loading import load_causal_lm
from dape.ops.score_attention import attention
from dape.scores import PlainScores, ScoreConv
from dape.tasks import build_task
from dape.tasks.base import generator_for
from dape.training import Run as TrainedRun

MODELS = Path(__file__).parents[1] / "models"


@dataclass(frozen=True)
class Small(Job):
    """A run whose rows all come at once."""

    method: str
    seed: int = 0

    @property
    def steps(self) -> int:
        return 1

    @property
    def training(self) -> str:
        return self.id

    def missing(self, table: pd.DataFrame) -> list[int]:
        return [] if (table["run"] == self.id).any() else [0]


@dataclass(frozen=True)
class Construction(Small):
    """The proposition without training: a 1×2 convolution with weights [−1, 1] recalls, without positions.

    A query and a key have the score −β⟨x_j, x_N⟩. The convolution turns it into −β⟨x_j − x_{j−1}, x_N⟩: β where the
    token before j is the queried one, never more than 0 elsewhere, so that all weight goes to the token that followed.
    """

    lengths: tuple[int, ...] = (12, 24, 48, 96)
    samples: int = 512
    sharpness: float = 50.0

    @property
    def about(self) -> dict[str, object]:
        return {"method": self.label or self.method, "seed": 0, "corpus": "construction", "train_length": 0}

    @cached_property
    def id(self) -> str:
        return (
            f"construction-{self.method}-{digest([self.method, self.lengths, self.samples, self.sharpness])}"
        )

    def work(self, folder: Path) -> None:
        task = build_task("associative_recall")
        scores = PlainScores() if self.method == "nope" else difference_conv()
        rows = []
        for length in self.lengths:
            examples = task.examples(self.samples, length, generator_for(TESTING, 0, length))
            ids = torch.from_numpy(examples.ids)
            x = torch.nn.functional.one_hot(ids, task.vocab_size).to(torch.float64)[:, None]
            found = attention(x, -x, x, scores, scale=self.sharpness, backend="reference")[:, 0].argmax(-1)
            right = examples.accuracy(found.numpy()) * self.samples
            rows.append({"length": length, "metric": "accuracy", "sum": right, "count": self.samples})
        self.add_rows(folder, make_table(rows))


def difference_conv() -> ScoreConv:
    """S_j − S_{j−1}: the residual gives S_j, the two convolutions −S_{j−1}.

    LeakyReLU(x) − LeakyReLU(−x) = (1 + slope)·x, so that two channels together are linear.
    """
    conv = ScoreConv(1, 2, kernel_size=2, bias_channels=False).double()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.zero_()
        # Taps: the key before, the key itself.
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
        conv.expand.weight[:, 0, 0, 0] = -signs
        conv.project.weight[0, :, 0, 1] = signs / (1 + conv.negative_slope)
    return conv.requires_grad_(False)


@dataclass(frozen=True)
class Decoding(Small):
    """A shipped model looks at nothing to come: its losses decoded token by token from a cache equal those of one pass,
    and other tokens after a place change no loss before it. Rows: the largest difference of a loss, in nats."""

    length: int = 1024
    last: int = 64
    windows: int = 8

    @property
    def about(self) -> dict[str, object]:
        return {"method": self.label or self.method, "seed": 0, "corpus": "python", "train_length": 128}

    @property
    def id(self) -> str:
        return f"decoding-{self.method}-{self.length}x{self.windows}"

    def work(self, folder: Path) -> None:
        shipped = MODELS / self.method
        model, tokenizer = load_causal_lm(shipped, dtype=torch.float32).eval(), load_tokenizer(shipped)
        sources = [one for one in find_corpus("python").sources if one.name.split("/")[0] in HELD_OUT]
        texts = ("".join(chunk.text for chunk in one.read(lambda problem: None)) for one in sources)
        encoded = (tokenizer.encode(text)[: self.length + 1] for text in texts)
        ids = torch.tensor(
            [one for one in encoded if len(one) > self.length][:: len(sources) // self.windows]
        )
        inputs, start = ids[:, :-1], self.length - self.last
        targets, half = ids[:, start + 1 :], self.last // 2
        other = inputs.clone()
        other[:, start + half :] = inputs[:, : self.last - half]
        with torch.no_grad():
            one_pass = losses_of(model(inputs).logits[:, start:], targets)
            seen = model(inputs[:, :start], use_cache=True)
            steps = []
            for token in inputs[:, start:].split(1, dim=1):
                seen = model(token, past_key_values=seen.past_key_values, use_cache=True)
                steps.append(seen.logits)
            decoded = losses_of(torch.cat(steps, 1), targets)
            before = losses_of(model(other).logits[:, start : start + half], targets[:, :half])
        found = {"decoded": decoded - one_pass, "followed": before - one_pass[:, :half]}
        rows = [{"length": self.length, "metric": m, "sum": float(x.abs().max())} for m, x in found.items()]
        self.add_rows(folder, make_table(rows))


def losses_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss of every target [B, T] in float64."""
    return torch.nn.functional.cross_entropy(logits.double().transpose(1, 2), targets, reduction="none")


@dataclass(frozen=True)
class StepTime(Small):
    """Time of a training step, interleaved with that of a base: the ratio of every round."""

    size: str = "tiny"
    length: int = 512
    batch: int = 1
    rounds: int = 9
    base: tuple[str, ...] = ("dape1x3-kerple", "512", "1")

    @property
    def about(self) -> dict[str, object]:
        name = self.label or self.method
        return {"method": name, "seed": 0, "corpus": self.size, "train_length": self.length}

    @property
    def id(self) -> str:
        return f"{self.size}-{self.method}-{self.length}x{self.batch}-{self.rounds}rounds"

    def work(self, folder: Path) -> None:
        base, length, batch = self.base[0], int(self.base[1]), int(self.base[2])
        device = "cuda" if torch.cuda.is_available() else "cpu"
        own = Options(preset=self.size, length=self.length, batch=self.batch, device=device)
        steps = {"own": training_step(self.method, own)}
        steps["base"] = training_step(base, replace(own, length=length, batch=batch))
        taken = take_turns(steps, self.rounds, device)
        ratios = np.array(taken["own"]) / np.array(taken["base"])
        # Median and its error: robust against a busy machine.
        error = 1.2533 * 1.4826 * float(np.median(np.abs(ratios - np.median(ratios)))) / self.rounds**0.5
        values = {"milliseconds": 1000 * float(np.median(taken["own"])), "ratio_error": error}
        values["ratio"] = float(np.median(ratios))
        rows = [
            {"length": self.length, "metric": name, "sum": value * self.rounds, "count": self.rounds}
            for name, value in values.items()
        ]
        self.add_rows(folder, make_table(rows))


@dataclass(frozen=True)
class MapRun(Run):
    """A language model whose attention weights are measured on excerpts of held-out text, head by head."""

    samples: int = 16

    def missing(self, table: pd.DataFrame) -> list[int]:
        known = set(table[table["run"] == self.id]["length"])
        return [length for length in self.lengths if length not in known]

    def evaluate(self, run: TrainedRun, folder: Path) -> None:
        tokens, model = run.data().validation, run.model()
        windows = same_targets(tokens, max(self.lengths), 1, self.samples)
        for length in self.missing(self.done(folder)):
            rows: list[dict[str, object]] = []
            for number, ids in enumerate(windows.ids(tokens, length)[:, :-1]):
                seen = inspect(model, ids, resolution=min(length, 192))
                for layer in seen.layers:
                    for head, share in enumerate(layer.sink):
                        own = {
                            "length": length,
                            "document": number,
                            "slice": f"layer {layer.layer} head {head}",
                        }
                        entropy = float(layer.entropy[head])
                        rows.append({**own, "metric": "sink_share", "sum": float(share)})
                        rows.append({**own, "metric": "entropy", "sum": entropy})
            self.add_rows(folder, make_table(rows))
