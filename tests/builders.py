"""Tiny models and fresh interpreters that tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dape.data import ByteTokenizer
from dape.models import DapeConfig, DapeForCausalLM

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


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


def python(*arguments: object, **environment: str) -> str:
    """What a fresh interpreter prints, offline."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def torchrun(script: Path, *arguments: object) -> str:
    """What two processes of a script print."""
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script, *arguments)
