"""The proposition by construction: a 1×2 convolution with weights [−1, 1] recalls, without positions or training.

One head, no position encoding. A query and a key have the score −β⟨x_j, x_N⟩ (the paper's product of weights is −I).
The convolution turns it into −β⟨x_j − x_{j−1}, x_N⟩: β where the token before j is the queried one, never more than 0
elsewhere. All weight therefore goes to the token that followed x_N, which is the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dape.lab.solving import TESTING
from dape.ops.score_attention import attention
from dape.scores import PlainScores, ScoreConv
from dape.scores.base import ScoreProcessor
from dape.tasks import build_task
from dape.tasks.base import generator_for


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


def answers(ids: Tensor, vocab_size: int, scores: ScoreProcessor, sharpness: float) -> Tensor:
    """Predicted token at every position [B, T], from one-hot embeddings, by the largest entry of the output."""
    x = torch.nn.functional.one_hot(ids, vocab_size).to(torch.float64)[:, None]
    return attention(x, -x, x, scores, scale=sharpness, backend="reference")[:, 0].argmax(-1)


def construction_runs(settings: dict[str, Any]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Runs with their rows, accuracy at each length: with the convolution, and with the same scores unprocessed."""
    task = build_task("associative_recall", **settings.get("options", {}))
    processors: dict[str, ScoreProcessor] = {"dape1x2-nope": difference_conv(), "nope": PlainScores()}
    runs = []
    for method, scores in processors.items():
        rows = []
        for length in settings["lengths"]:
            examples = task.examples(settings["samples"], length, generator_for(TESTING, 0, length))
            predicted = answers(
                torch.from_numpy(examples.ids), task.vocab_size, scores, settings["sharpness"]
            )
            accuracy = examples.accuracy(predicted.numpy())
            row = {
                "metric": "accuracy",
                "eval_length": length,
                "value": accuracy,
                "count": settings["samples"],
            }
            rows.append(row)
        runs.append(({"method": method, "corpus": "construction", "layers": 1, "seed": 0}, rows))
    return runs
