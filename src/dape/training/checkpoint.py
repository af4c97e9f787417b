"""Checkpoints: written atomically, with a SHA-256 for every file, checked before loading.

step-00000200/  model.safetensors  optimizer.safetensors  state.json  checksums.json

Tensors are gathered, so that any number of processes continues, and saved as safetensors, never pickles.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from dape.checksums import CHECKSUMS, LaterFormat, verify_checksums, write_checksums
from dape.files import exclusive, read_json, sync_folder, write_atomically
from dape.settings import changed_setting
from dape.training.config import DiskFull, LoopSettings
from dape.training.parallel import Parallel

STATE = "state.json"
# Contents of that file: the step, and what continues beside the tensors.
State = dict[str, Any]


class Checkpoints:
    """The checkpoints of a run, oldest first in `all()`; at most `keep` of them are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def all(self) -> list[Path]:
        matches = (re.fullmatch(r"step-(\d{8,})", path.name) for path in self.folder.glob("step-*"))
        return [self.path(step) for step in sorted(int(match[1]) for match in matches if match)]

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def write(self, tensors: Mapping[str, Mapping[str, Tensor]], state: State) -> Path:
        """Save groups of tensors, one file each, and the JSON state, as the checkpoint of its step.

        Everything goes into a temporary folder, which readers ignore, the checksums last; old checkpoints are deleted
        after it is renamed.
        """
        step: int = state["step"]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.discard_unfinished()
        temporary, final = self.folder / f".writing-{step:08d}", self.path(step)
        temporary.mkdir()
        try:
            for group, members in tensors.items():
                write_tensors(temporary / f"{group}.safetensors", members)
            write_atomically(temporary / STATE, json.dumps(state, indent=2))
            write_checksums(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if final.exists():
            shutil.rmtree(final)
        os.rename(temporary, final)
        sync_folder(self.folder)
        for old in self.all()[: -self.keep]:
            shutil.rmtree(old)
        return final

    def newest_good(self, say: Callable[[str], None]) -> Path | None:
        """The newest intact checkpoint; damaged ones are set aside and reported by `say`.

        One that this process may not read, or that a later version wrote, is not damaged: it raises.
        """
        self.discard_unfinished()
        for path in reversed(self.all()):
            damage = find_damage(path)
            if damage is None:
                return path
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)
            say(f"checkpoint {path.name} is damaged ({damage}): set aside as {aside.name}")
        return None

    def discard_unfinished(self) -> None:
        for path in self.folder.glob(".writing-*"):
            shutil.rmtree(path, ignore_errors=True)


def find_damage(path: Path) -> str | None:
    """Description of the damage of a checkpoint, or None; raises OSError if it cannot be read."""
    if not (path / CHECKSUMS).exists():
        return f"{CHECKSUMS} is missing"
    try:
        verify_checksums(path)
    except LaterFormat:
        raise
    except ValueError as error:
        return str(error)
    return None


def read_state(path: Path) -> dict[str, Any]:
    return read_json(path / STATE)


DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, without a copy of the tensors in memory; a full disk raises OSError."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold")
        offsets = [offset, offset + tensor.numel() * tensor.element_size()]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(header).encode()
    # The format requires the data to start at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def optimizer_entries(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's tensors, named parameter:key."""
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}:{key}", value


def load_model_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy the tensors into the model; raises, with an example, if names or shapes differ."""
    own = model.state_dict()
    if differing := sorted(own.keys() ^ tensors.keys()):
        raise ValueError(
            f"the checkpoint belongs to another model: {differing[0]} is in only one of them "
            f"({len(differing)} such names); train in another folder"
        )
    for name, target in own.items():
        if target.shape != tensors[name].shape:
            raise ValueError(
                f"the checkpoint belongs to another model: {name} has shape {tuple(tensors[name].shape)} there "
                f"and {tuple(target.shape)} here; train in another folder"
            )
        with torch.no_grad():
            target.copy_(_like(tensors[name], target))


def load_optimizer_tensors(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for entry, value in tensors.items():
        name, key = entry.rsplit(":", 1)
        parameter = parameters[name]
        moment = value.shape == parameter.shape and value.dim() > 0
        placed = _like(value, parameter) if moment else value.to(parameter.device)
        optimizer.state[parameter][key] = placed


def gather(entries: Iterable[tuple[str, Tensor]], *, keep: bool = True) -> dict[str, Tensor]:
    """Whole tensors by name. Every process must call it; only those with `keep` get the result."""
    tensors = {}
    for name, tensor in entries:
        whole = tensor.detach()
        # A sharded tensor is gathered by all processes, whether or not this one keeps it.
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        if keep:
            tensors[name] = whole.cpu()
    return tensors


def _like(whole: Tensor, target: Tensor) -> Tensor:
    """The tensor on the target's device, sharded like the target."""
    if hasattr(target, "placements"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole.to(target.device), target.device_mesh, target.placements)  # type: ignore[attr-defined]  # a DTensor
    return whole.to(target.device)


def save_checkpoint(
    checkpoints: Checkpoints, model: nn.Module, optimizer: Optimizer, state: State, parallel: Parallel
) -> None:
    """Write a checkpoint, which the main process gathers; every process calls it."""
    tensors = {
        "model": gather(model.state_dict().items(), keep=parallel.main),
        "optimizer": gather(optimizer_entries(model, optimizer), keep=parallel.main),
    }
    if parallel.main:
        checkpoints.write(tensors, state)


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    load_model_tensors(model, load_file(path / "model.safetensors"))
    load_optimizer_tensors(model, optimizer, load_file(path / "optimizer.safetensors"))


def locked(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Lock the folder, or raise if another process holds it."""
    busy = f"another process is training in {folder}: wait for it, or use another folder"
    return exclusive(folder / ".lock", busy=busy)


def check_same_run(folder: Path, before: dict[str, Any], settings: LoopSettings) -> None:
    """Raise if the settings of the run in the folder are those of another run."""
    # A text may have moved: the code that reads it compares its contents.
    moved = {"corpus": corpus} if (corpus := getattr(settings, "corpus", None)) is not None else {}
    if difference := changed_setting({**before, **moved}, settings):
        raise _another_run(folder, *difference)


def check_same_task(folder: Path, before: Any, now: Any) -> None:
    """Raise if a checkpoint's task is not the one to train."""
    before, now = before or {}, now or {}
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise _another_run(folder, name, before.get(name), now.get(name))


def _another_run(folder: Path, name: str, old: Any, new: Any) -> ValueError:
    return ValueError(
        f"{folder} holds a run with {name}={old}, now {name}={new} was given: choose another folder, or delete that run"
    )


@contextlib.contextmanager
def room_on_disk(step: int, saved: int, parallel: Parallel | None = None) -> Iterator[None]:
    """Raise DiskFull in every process that takes part in the writing if the disk of one is full."""
    failure = None
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        failure = f"the disk is full at step {step}"
    failure = parallel.agree(failure) if parallel else failure
    if failure:
        kept = f"the checkpoint of step {saved} is intact" if saved > 0 else "there is no checkpoint yet"
        raise DiskFull(f"{failure}; {kept}: make room and rerun the same command to continue")
