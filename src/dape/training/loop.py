"""The loop: `fit` trains any task, resumes by itself and loses nothing.

step → batch → loss, backward (in pieces) → clip → AdamW → a line of metrics; now and then a checkpoint
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dape.files import sweep
from dape.training.checkpoint import Checkpoints, read_state
from dape.training.guard import Guard
from dape.training.lock import locked
from dape.training.metrics import MetricsLog, Record, read_metrics
from dape.training.optimizer import build_optimizer, clip_gradient, learning_rate_at, set_learning_rate
from dape.training.parallel import Parallel, processes
from dape.training.precision import autocast, check_precision
from dape.training.progress import Display, open_display
from dape.training.safety import check_same_run, room_on_disk
from dape.training.seeds import seed_generators
from dape.training.settings import FitResult, LoopSettings, TrainingStopped
from dape.training.signals import StopRequest
from dape.training.storage import STORAGES
from dape.training.task import TrainingTask, move
from dape.training.trackers import Tracker, open_trackers

# Called with each step's record, in order; returning True asks the loop to save and stop.
OnStep = Callable[[Record], bool | None]


def fit(
    task: TrainingTask,
    settings: LoopSettings,
    folder: Path,
    *,
    on_step: OnStep | None = None,
    progress: bool = True,
) -> FitResult:
    """Train the task's model in place, up to the last step, continuing from what is in the folder.

    folder/checkpoints holds the newest checkpoints, folder/metrics.jsonl a line for every step. Ctrl-C and
    SIGTERM save and return early. Raises TrainingStopped where going on makes no sense.
    """
    folder = Path(folder)
    with contextlib.ExitStack() as stack:
        parallel = stack.enter_context(processes(settings))
        check_precision(settings.precision, parallel.device)
        if parallel.main:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
            sweep(folder)
        parallel.wait()
        # What a step draws at random is seeded by the step; the caller's own generators are left alone.
        cuda = [parallel.device] if parallel.device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stop = stack.enter_context(StopRequest())
        loop = Loop(task, settings, folder, parallel, stop, on_step)
        loop.resume()
        loop.open_logs(stack, progress=progress)
        return loop.run()


class Loop:
    """The state of a run between two steps."""

    def __init__(
        self,
        task: TrainingTask,
        settings: LoopSettings,
        folder: Path,
        parallel: Parallel,
        stop: StopRequest,
        on_step: OnStep | None = None,
    ) -> None:
        self.task, self.settings, self.folder, self.parallel = task, settings, folder, parallel
        self.stop, self.on_step = stop, on_step
        self.model = task.model.to(parallel.device).train()
        self.wrapped = parallel.wrap(self.model)
        self.called: nn.Module = torch.compile(self.wrapped) if settings.compile else self.wrapped  # type: ignore[assignment]  # declared a function, is a module
        factors = getattr(task, "rate_factors", None)
        self.optimizer = build_optimizer(self.model, settings, parallel.device, factors and factors())
        self.scaler = torch.amp.GradScaler(parallel.device.type, enabled=settings.precision == "fp16")
        self.checkpoints = Checkpoints(folder / "checkpoints", settings.keep_checkpoints)
        self.guard = Guard()
        self.step, self.saved, self.tokens, self.seconds = 0, -1, 0, 0.0
        self.last_loss = math.nan
        self.notes: list[str] = []
        self.pending: list[tuple[Record, Tensor]] = []
        self.log: MetricsLog | None = None
        self.trackers: list[Tracker] = []
        self.display: Display = open_display(
            settings.steps, Record(step=0, tokens=0, seconds=0.0), wanted=False
        )

    def run(self) -> FitResult:
        settings, stopped = self.settings, None
        while self.step < settings.steps and stopped is None:
            self.take_step()
            at_checkpoint = self.step % settings.checkpoint_every == 0 or self.step == settings.steps
            if (
                at_checkpoint
                or self.step % settings.log_every == 0
                or (self.stop.reason and self.parallel.world == 1)
            ):
                stopped = self.flush()
                if at_checkpoint or stopped:
                    self.save()
        stopped = stopped if self.step < settings.steps else None
        return FitResult(self.step, self.last_loss, self.seconds, self.tokens, stopped, tuple(self.notes))

    def take_step(self) -> None:
        """One optimizer step on the global batch of the next step."""
        start, self.step = time.perf_counter(), self.step + 1
        settings, scaler = self.settings, self.scaler
        seed_generators("step", settings.seed, self.step, self.parallel.rank)
        rate = learning_rate_at(self.step, settings)
        set_learning_rate(self.optimizer, rate)
        batch = self.task.batch(self.step - 1)
        size = self.task.size(batch)
        loss = self.backward(batch, size)
        scaler.unscale_(self.optimizer)
        norm = clip_gradient(self.model, settings.clip)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens += size
        self.seconds += time.perf_counter() - start
        record = Record(
            step=self.step, learning_rate=rate, tokens=self.tokens, seconds=round(self.seconds, 4)
        )
        self.pending.append((record, torch.stack((loss, norm.to(loss)))))

    def backward(self, batch: Any, size: int) -> Tensor:
        """Gradients of the global batch's mean loss; returns this process's share of that loss."""
        parallel, pieces = self.parallel, self.settings.accumulate
        total = torch.zeros((), device=parallel.device)
        for piece in range(pieces):
            part = self.task.shard(batch, parallel.rank * pieces + piece, parallel.world * pieces)
            count = self.task.size(part)
            if count == 0 and parallel.world * pieces > 1:
                raise ValueError(
                    f"a batch of {size} targets cannot be cut into {parallel.world} processes × {pieces} pieces: "
                    f"take a larger batch, or fewer pieces"
                )
            part = move(part, parallel.device)
            with parallel.exchange(self.wrapped, piece == pieces - 1):
                with autocast(self.settings.precision, parallel.device):
                    loss = self.task.loss(self.called, part)
                # Processes average their gradients; a part counts by its share of the targets.
                self.scaler.scale(loss * (count * parallel.world / size)).backward()
            total += loss.detach().float() * (count / size)
        return total

    def flush(self) -> str | None:
        """Bring the metrics of the steps since the last flush to everyone; returns why to stop, if so."""
        parallel, pending = self.parallel, self.pending
        self.pending = []
        values = torch.stack([value for _, value in pending])
        losses = parallel.total(values[:, 0].contiguous()).tolist()
        norms = values[:, 1].tolist()
        asked = self.stop.reason
        for (record, _), loss, norm in zip(pending, losses, norms, strict=True):
            record |= {"loss": loss, "gradient_norm": norm}
            self.last_loss = loss
            self.check(record)
            if self.on_step is not None and self.on_step(record):
                asked = asked or "on_step"
        with room_on_disk(self.step, self.saved):
            if self.log is not None:
                self.log.append(record for record, _ in pending)
        for tracker in self.trackers:
            for record, _ in pending:
                tracker.log(record)
        self.display.show(pending[-1][0])
        if parallel.world > 1:
            # A signal may have reached some processes only, or at different steps.
            wishes = parallel.total(torch.tensor([float(asked is not None)]))
            asked = (asked or "another process") if wishes.item() else None
        return asked

    def check(self, record: Record) -> None:
        try:
            self.guard.watch(record, self.settings)
        except TrainingStopped as error:
            kept = f"; the checkpoint of step {self.saved} is intact" if self.saved > 0 else ""
            raise type(error)(f"{error}{kept}") from None

    def save(self) -> None:
        """Write the checkpoint of this step."""
        if self.saved == self.step:
            return
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "guard": asdict(self.guard),
            "scaler": self.scaler.state_dict(),
            "settings": asdict(self.settings),
            "format": self.settings.checkpoint_format,
            "processes": self.parallel.world,
        }
        storage = STORAGES[self.settings.checkpoint_format]
        with room_on_disk(self.step, self.saved, self.parallel):
            storage.save(self.checkpoints, self.step, self.model, self.optimizer, state, self.parallel)
        self.saved = self.step

    def resume(self) -> None:
        """Continue from the newest checkpoint that is whole, if there is any."""
        parallel = self.parallel
        found = self.checkpoints.newest_good(self.say) if parallel.main else None
        path = parallel.agree(found)
        if path is None:
            if self.notes:
                self.say("no whole checkpoint is left: starting again from step 0")
            return
        state = read_state(path)
        check_same_run(state["settings"], self.settings)
        STORAGES[state["format"]].load(path, self.model, self.optimizer)
        self.step = self.saved = state["step"]
        self.tokens, self.seconds = state["tokens"], state["seconds"]
        self.guard = Guard(**state["guard"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        records = read_metrics(self.folder / "metrics.jsonl")
        self.last_loss = next((r["loss"] for r in reversed(records) if r["step"] == self.step), math.nan)
        if parallel.main:
            self.say(
                f"continuing from step {self.step}" if self.step < self.settings.steps else "already trained"
            )

    def open_logs(self, stack: contextlib.ExitStack, *, progress: bool) -> None:
        """Metrics, trackers and the display belong to the main process."""
        if not self.parallel.main:
            return
        with room_on_disk(self.step, self.saved):
            self.log = MetricsLog(self.folder / "metrics.jsonl", self.step)
        stack.callback(self.log.close)
        start = Record(step=self.step, tokens=self.tokens, seconds=self.seconds)
        self.trackers = open_trackers(self.settings, self.folder)
        self.display = open_display(self.settings.steps, start, wanted=progress)
        stack.callback(self.display.close)
        for tracker in self.trackers:
            stack.callback(tracker.close)

    def say(self, message: str) -> None:
        self.notes.append(message)
        self.display.say(message)
