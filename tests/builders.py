"""Tiny models that tests share."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from dape.data import ByteTokenizer
from dape.models import DapeConfig, DapeForCausalLM

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


# Of `dape train` and `dape compare`, on `write_texts`.
SMALL_RUN = {"num_layers": 1, "hidden_size": 16, "num_heads": 4, "train_length": 8, "batch_size": 2}
SMALL_RUN |= {"validation": "0.5"}


def write_texts(folder: Path) -> str:
    """A new folder of twelve texts, each with numbers of its own."""
    folder.mkdir()
    for number in range(12):
        words = " ".join(f"{number * word % 17} and {word}" for word in range(60))
        (folder / f"{number}.txt").write_text(words)
    return str(folder)


def decoder(method: str = "dape1x3-kerple", **changes: object) -> DapeForCausalLM:
    torch.manual_seed(0)
    return DapeForCausalLM(DapeConfig(method=method, **{**SIZES, "score_width": 8, **changes})).eval()


def llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "intermediate_size": 48, **changes})).eval()


def llama_of_bytes(folder: Path, **changes: object) -> Path:
    """A folder with a tiny Llama that reads 16 bytes, and its tokenizer."""
    sizes = {"vocab_size": 257, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": None}
    llama(**{**sizes, **changes}).save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder


def quiet_arguments(folder: Path, **changes: object) -> TrainingArguments:
    """Of a Trainer on a CPU, in batches of four, which reports to nobody."""
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    return TrainingArguments(output_dir=str(folder), per_device_train_batch_size=4, **quiet, **changes)
