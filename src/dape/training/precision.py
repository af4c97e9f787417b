"""Number formats: the autocast of a precision, and whether this machine can run it."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from contextlib import AbstractContextManager

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Sizes at which vendor libraries take their matrix units, which is where unusable ones end the process.
PROBE = """
import torch
with torch.autocast("cpu", dtype=getattr(torch, "{dtype}")):
    x = torch.randn(256, 256, requires_grad=True)
    (x @ torch.randn(256, 256)).float().sum().backward()
"""


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass; parameters stay in float32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def check_precision(precision: str, device: torch.device) -> None:
    """Raise, with what to do, where the precision cannot run: tried in a process of its own, as it may die."""
    if precision == "fp32":
        return
    if device.type == "cuda":
        if precision == "bf16" and not torch.cuda.is_bf16_supported():
            raise ValueError(f"{torch.cuda.get_device_name(device)} has no bfloat16: use --precision fp16")
        return
    if device.type == "cpu" and not _cpu_can(str(DTYPES[precision]).removeprefix("torch.")):
        remedy = (
            ", or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment before starting"
            if precision == "bf16" and "ONEDNN_MAX_CPU_ISA" not in os.environ
            else ""
        )
        raise ValueError(
            f"a {precision} matrix product ends the process on this CPU (tried in a subprocess): "
            f"use --precision fp32{remedy}"
        )


@functools.cache
def _cpu_can(dtype: str) -> bool:
    tried = subprocess.run(
        [sys.executable, "-c", PROBE.format(dtype=dtype)], capture_output=True, timeout=120, check=False
    )
    return tried.returncode == 0
