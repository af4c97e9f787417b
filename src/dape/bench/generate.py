"""`dape bench generate`: tokens a second of greedy generation, against a Llama of the same size on PyTorch's attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dape.bench import train
from dape.bench.report import Record
from dape.bench.timing import interleave
from dape.settings import TOKENS, setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LLAMA = "llama"
COLUMNS = (
    ("model", "method", ""),
    ("parameters", "parameters", ",d"),
    ("ms a token", "milliseconds", ".2f"),
    ("± (IQR)", "spread", ".2f"),
    ("tokens a second", "tokens_per_second", ",.1f"),
    ("× llama", "ratio_to_llama", ".3f"),
)


@dataclass(frozen=True)
class Options(train.StepOptions):
    """Time greedy generation with a cache for several methods, as ratios to a Llama of transformers on SDPA."""

    length: int = setting(32, help="Tokens of the prompt.", **TOKENS)
    batch: int = setting(1, help="Batch size.", low=1, high=2**20)
    tokens: int = setting(256, help="New tokens.", **TOKENS)
    rounds: int = setting(5, help="Rounds; the median is reported.", low=1, high=10**6)


def run(options: Options) -> list[Record]:
    """One record per model."""
    device = options.prepare()
    models = {LLAMA: llama(options), **{name: ours(name, options) for name in options.methods.split(",")}}
    candidates = {name: generation(model, device, options) for name, model in models.items()}
    timings = interleave(candidates, options.rounds, str(device), options.clock)
    return [
        {
            "method": name,
            **options.record(),
            "tokens": options.tokens,
            "parameters": models[name].num_parameters(),
            "milliseconds": timing.milliseconds / options.tokens,
            "spread": timing.spread / options.tokens,
            "tokens_per_second": options.batch * options.tokens / timing.milliseconds * 1e3,
            "ratio_to_llama": timings[LLAMA].milliseconds / timing.milliseconds,
        }
        for name, timing in timings.items()
    ]


def ours(method: str, options: Options) -> PreTrainedModel:
    from dape.models import DapeForCausalLM

    torch.manual_seed(0)
    return DapeForCausalLM(options.config(method))


def llama(options: Options) -> PreTrainedModel:
    """A Llama with the layers, width and heads of a preset; its gated MLP has as many parameters as ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = options.config("rope")
    same = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "tie_word_embeddings")
    sizes: dict[str, Any] = {name: getattr(ours, name) for name in same} | {"attn_implementation": "sdpa"}
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**sizes, intermediate_size=ours.hidden_size * 8 // 3, max_position_embeddings=8192)
    )


def generation(model: PreTrainedModel, device: torch.device, options: Options) -> Callable[[], object]:
    """Greedy generation of a fixed number of tokens from a random prompt."""
    torch.nn.Module.to(model, device).eval()
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.length)
    prompt = torch.randint(1, model.config.vocab_size, shape, generator=generator).to(device)
    counts = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens}

    def run() -> object:
        return model.generate(  # type: ignore[operator]  # every causal model has it
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0, **counts
        )

    return run
