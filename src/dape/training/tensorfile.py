"""Tensors to a safetensors file, streamed: one tensor in memory at a time, hashed as it is written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write the file and return its SHA-256. A full disk is an OSError, here and in no foreign code."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    # The format wants the data to start at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            digest.update(piece)
            file.write(piece)
        for tensor in tensors.values():
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(raw.data)
            file.write(raw.data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
