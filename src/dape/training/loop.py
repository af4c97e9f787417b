"""The training loop: `fit` trains any task and resumes automatically and exactly.

step → batch → loss, backward (in micro-batches) → clip → AdamW → a line of metrics; at intervals a validation loss
and a checkpoint
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils._pytree import tree_map_only

from dape.files import sweep
from dape.positions import PositionEncoding
from dape.scores import ScoreProcessor
from dape.training.checkpoint import (
    Checkpoints,
    check_same_run,
    check_same_task,
    load_checkpoint,
    locked,
    read_state,
    room_on_disk,
    save_checkpoint,
)
from dape.training.config import Diverged, FitResult, LoopSettings, TrainingStopped
from dape.training.display import Display, MetricsLog, Record, read_metrics
from dape.training.parallel import Parallel, autocast, check_precision, processes
from dape.training.trackers import Trackers


class TrainingTask(Protocol):
    """Interface of a task to train, such as language modelling and the generated tasks.

    A batch is a tensor, or tensors in tuples, lists and dicts; the loop moves them to the device.
    """

    @property
    def model(self) -> nn.Module:
        """The model to train; the loop changes its parameters in place."""

    def batch(self, step: int) -> Any:
        """The whole batch of a step, on the CPU: a function of the task's seed and the step alone."""

    def shard(self, batch: Any, rank: int, world: int) -> Any:
        """Part `rank` of the `world` disjoint parts of the batch."""

    def size(self, batch: Any) -> int:
        """Number of targets in a batch or part of one."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss over the targets of the batch; `model` is `self.model`, perhaps wrapped."""

    # A task may also have `held_out()`: batches, as large as those of a step, for the validation loss; `identity()`: what
    # fixes the training beside the loop's settings, as JSON data, which a resumed run must have in common; and `restarts`:
    # steps from which on the loss is another, which the check for divergence does not compare with those before.


def move(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def derive_seed(*parts: object) -> int:
    """A 63-bit seed derived from the parts by a hash."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_generators(*parts: object) -> None:
    """Seed torch's global generators with a seed derived from the parts."""
    seed = derive_seed(*parts)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Reinitialise all parameters, each module with a seed derived from its name.

    Modules with the same name and shape in two models then start equal: methods are compared from the same
    embeddings, projections, MLPs and head. The global generators are not affected.
    """
    draw = cast(Callable[[nn.Module], None], getattr(model, "_init_weights", _reset))
    with torch.random.fork_rng(devices=[]):
        # Children before parents, which may reset their children.
        for name, module in reversed(list(model.named_modules())):
            torch.default_generator.manual_seed(derive_seed("initial", seed, name))
            draw(module)


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def undecayed_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Positional, convolution and 1-D parameters: weight decay on those would bias the comparison of methods."""
    owned = {
        parameter
        for module in model.modules()
        if isinstance(module, PositionEncoding | ScoreProcessor)
        for parameter in module.parameters()
    }
    return owned | {parameter for parameter in model.parameters() if parameter.dim() < 2}


def build_optimizer(
    model: nn.Module,
    settings: LoopSettings,
    device: torch.device,
    rate_factors: Mapping[nn.Parameter, float] | None = None,
) -> AdamW:
    """AdamW over the trainable parameters. rate_factors: learning rate multipliers of individual parameters."""
    factors, undecayed = rate_factors or {}, undecayed_parameters(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decay = 0.0 if parameter in undecayed else settings.weight_decay
            groups.setdefault((-decay, factors.get(parameter, 1.0)), []).append(parameter)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter to train")
    described = [
        {"params": members, "weight_decay": -decay, "rate_factor": factor}
        for (decay, factor), members in sorted(groups.items(), key=lambda item: item[0])
    ]
    return AdamW(
        described, lr=settings.learning_rate, betas=settings.betas, fused=device.type in FUSED_DEVICES
    )


def learning_rate_at(step: int, settings: LoopSettings) -> float:
    """Learning rate of a step, counted from 1: linear warm-up, then cosine decay."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    after = max(1, settings.steps - settings.warmup_steps)
    fraction = min(1.0, (step - settings.warmup_steps) / after)
    final, height = settings.final_learning_rate, settings.learning_rate - settings.final_learning_rate
    return final + height * 0.5 * (1 + math.cos(math.pi * fraction))


def clip_gradient(model: nn.Module, limit: float) -> Tensor:
    """Clip the gradient norm to the limit, if there is one; returns the norm before clipping."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.clip_grad_norm_(parameters, limit or math.inf)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


SMOOTHING = 0.9


@dataclass
class Guard:
    """Divergence check by the first and the smoothed loss, which are saved in checkpoints."""

    first: float | None = None
    smoothed: float = 0.0

    def watch(self, record: Record, settings: LoopSettings) -> None:
        """Update with a step's record; raise Diverged if training has failed."""
        loss = record["loss"]
        # With fp16 the scaler skips a step whose gradient overflowed; only the loss itself is a failure.
        norm = 0.0 if settings.precision == "fp16" else record["gradient_norm"]
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise Diverged(self._sentence(f"the {name} became {value}", record, settings))
        self.first = loss if self.first is None else self.first
        self.smoothed = SMOOTHING * self.smoothed + (1 - SMOOTHING) * loss if self.smoothed else loss
        if self.smoothed > settings.explosion * max(self.first, 0.0) > 0:
            grown = f"the smoothed loss grew to {self.smoothed:.3g}, from {self.first:.3g} at the first step,"
            raise Diverged(self._sentence(grown, record, settings))

    def _sentence(self, what: str, record: Record, settings: LoopSettings) -> str:
        advice = [f"a lower --learning-rate than {settings.learning_rate:g}"]
        advice.append(f"more --warmup-steps than {settings.warmup_steps}")
        if settings.clip == 0 or settings.clip > 1:
            advice.append("--clip 1")
        if settings.precision != "fp32":
            advice.append("--precision fp32")
        return (
            f"{what} at step {int(record['step'])} (learning rate {record['learning_rate']:.3g}, gradient norm "
            f"{record['gradient_norm']:.3g}): try {', or '.join(advice)}"
        )


CAUGHT = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Context in which the first signal is recorded in `reason` and a second one interrupts at once.

    Signals reach the main thread alone, so this has no effect in another thread.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in CAUGHT}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def await_signal(self, seconds: float) -> None:
        """Wait until a signal is recorded, at most `seconds`; return at once if none can be."""
        until = time.monotonic() + seconds
        while self._before and self.reason is None and time.monotonic() < until:
            time.sleep(0.02)


# A launcher signals its processes one after the other, and the first may have stopped all of them before
# the last is signalled; if that one has left by then, the signal kills it.
SECONDS_TO_OWN_SIGNAL = 10.0

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
    """Train the task's model in place, continuing from the newest checkpoint in the folder.

    folder/checkpoints holds the newest checkpoints, folder/metrics.jsonl a line for every step. Ctrl-C and
    SIGTERM save and return early. Raises TrainingStopped if training cannot continue.
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
        # Random draws of a step are seeded by the step; the caller's generators are not affected.
        cuda = [parallel.device] if parallel.device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stop = stack.enter_context(StopRequest())
        loop = Loop(task, settings, folder, parallel, stop, on_step)
        stack.callback(parallel.release, loop.wrapped)
        loop.resume()
        loop.open_logs(stack, progress=progress)
        return loop.run()


class Loop:
    """State of a run between two steps."""

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
        self.trackers: Trackers | None = None
        self.display = Display(settings.steps, Record(step=0, tokens=0, seconds=0.0), wanted=False)

    def run(self) -> FitResult:
        settings, stopped = self.settings, None
        while self.step < settings.steps and stopped is None:
            self.take_step()
            last, every = self.step == settings.steps, settings.validate_every
            at_validation = bool(every) and (last or self.step % every == 0)
            at_checkpoint = last or self.step % settings.checkpoint_every == 0
            if at_validation:
                self.validate()
            if (
                at_checkpoint
                or at_validation
                or self.step % settings.log_every == 0
                or (self.stop.reason and self.parallel.world == 1)
            ):
                stopped = self.flush()
                if at_checkpoint or stopped:
                    self.save()
        stopped = stopped if self.step < settings.steps else None
        return FitResult(self.step, self.last_loss, self.seconds, self.tokens, stopped, tuple(self.notes))

    @torch.no_grad()
    def validate(self) -> None:
        """Add the validation loss over the task's held-out batches, if it has any, to the record of this step."""
        batches = list(getattr(self.task, "held_out", list)())
        if not batches:
            return
        parallel, num_parts = self.parallel, self.settings.accumulate
        targets = sum(self.task.size(batch) for batch in batches)
        total = torch.zeros(1, device=parallel.device)
        self.model.eval()
        # In as many micro-batches as in training, so that validation needs no more memory.
        for batch in batches:
            for index in range(num_parts):
                part = self.task.shard(batch, parallel.rank * num_parts + index, parallel.world * num_parts)
                with autocast(self.settings.precision, parallel.device):
                    loss = self.task.loss(self.wrapped, move(part, parallel.device))
                total += loss.float() * (self.task.size(part) / targets)
        self.model.train()
        self.pending[-1][0]["validation_loss"] = parallel.total(total).item()

    def take_step(self) -> None:
        """One optimizer step on the global batch of the next step."""
        start, self.step = time.perf_counter(), self.step + 1
        settings, scaler = self.settings, self.scaler
        seed_generators("step", settings.seed, self.step, self.parallel.rank)
        rate = learning_rate_at(self.step, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate_factor"]
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
        """Accumulate gradients of the global batch's mean loss; returns this process's share of that loss."""
        parallel, num_parts = self.parallel, self.settings.accumulate
        total = torch.zeros((), device=parallel.device)
        for index in range(num_parts):
            part = self.task.shard(batch, parallel.rank * num_parts + index, parallel.world * num_parts)
            count = self.task.size(part)
            if count == 0 and parallel.world * num_parts > 1:
                raise ValueError(
                    f"a batch of {size} targets cannot be split into {parallel.world} processes × {num_parts} micro-batches: "
                    f"take a larger batch, or fewer micro-batches"
                )
            part = move(part, parallel.device)
            with parallel.exchange(self.wrapped, index == num_parts - 1):
                with autocast(self.settings.precision, parallel.device):
                    loss = self.task.loss(self.called, part)
                # Processes average their gradients; a part counts by its share of the targets.
                self.scaler.scale(loss * (count * parallel.world / size)).backward()
            total += loss.detach().float() * (count / size)
        return total

    def flush(self) -> str | None:
        """Share the metrics of the steps since the last flush with all processes; returns the reason to stop, if any."""
        parallel, pending = self.parallel, self.pending
        self.pending = []
        start = time.perf_counter()
        values = torch.stack([value for _, value in pending])
        losses = parallel.total(values[:, 0].contiguous()).tolist()
        norms = values[:, 1].tolist()
        # A step on a GPU ends after its call: the wait for the steps of this flush is theirs, in equal shares.
        wait = time.perf_counter() - start
        for number, (record, _) in enumerate(pending, 1):
            record["seconds"] = round(record["seconds"] + wait * number / len(pending), 4)
        self.seconds += wait
        own_signal = asked = self.stop.reason
        for (record, _), loss, norm in zip(pending, losses, norms, strict=True):
            record |= {"loss": loss, "gradient_norm": norm}
            self.last_loss = loss
            self.check(record)
            if self.on_step is not None and self.on_step(record):
                asked = asked or "on_step"
        with room_on_disk(self.step, self.saved):
            if self.log is not None:
                self.log.append(record for record, _ in pending)
        if self.trackers is not None:
            self.trackers.log(record for record, _ in pending)
        self.display.show(pending[-1][0])
        if parallel.world > 1:
            # A signal may have reached some processes only, or at different steps.
            wishes = torch.tensor([float(asked is not None), float(own_signal is not None)])
            asking, signalled = parallel.total(wishes).tolist()
            if signalled:
                self.stop.await_signal(SECONDS_TO_OWN_SIGNAL)
            asked = (asked or self.stop.reason or "another process") if asking else None
        return asked

    def check(self, record: Record) -> None:
        if int(record["step"]) - 1 in getattr(self.task, "restarts", ()):
            self.guard = Guard()
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
            "task": self.identity(),
            "processes": self.parallel.world,
        }
        with room_on_disk(self.step, self.saved, self.parallel):
            save_checkpoint(self.checkpoints, self.model, self.optimizer, state, self.parallel)
        self.saved = self.step

    def resume(self) -> None:
        """Continue from the newest intact checkpoint, if there is any."""
        parallel = self.parallel
        newest = self.checkpoints.newest_good(self.say) if parallel.main else None
        path = parallel.agree(newest)
        if path is None:
            if self.notes:
                self.say("no intact checkpoint is left: starting from step 0")
            return
        state = read_state(path)
        check_same_run(self.folder, state["settings"], self.settings)
        check_same_task(self.folder, state.get("task"), self.identity())
        load_checkpoint(path, self.model, self.optimizer)
        self.step = self.saved = state["step"]
        self.tokens, self.seconds = state["tokens"], state["seconds"]
        self.guard = Guard(**state["guard"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        records = read_metrics(self.folder / "metrics.jsonl")
        self.last_loss = next((r["loss"] for r in reversed(records) if r["step"] == self.step), math.nan)
        if self.step == self.settings.steps:
            self.notes.append("already trained")
        elif parallel.main:
            self.say(f"continuing from step {self.step}")

    def open_logs(self, stack: contextlib.ExitStack, *, progress: bool) -> None:
        """Open metrics, trackers and the display, in the main process alone."""
        if not self.parallel.main:
            return
        self.trackers = Trackers(self.settings, self.folder, self.say)
        stack.callback(self.trackers.close)
        with room_on_disk(self.step, self.saved):
            self.log = MetricsLog(self.folder / "metrics.jsonl", self.step)
        stack.callback(self.log.close)
        start = Record(step=self.step, tokens=self.tokens, seconds=self.seconds)
        self.display = Display(self.settings.steps, start, wanted=progress)
        stack.callback(self.display.close)

    def identity(self) -> Any:
        """Description of the task, normalised by a round trip through JSON."""
        identity = getattr(self.task, "identity", None)
        return None if identity is None else json.loads(json.dumps(identity()))

    def say(self, message: str) -> None:
        self.notes.append(message)
        self.display.say(message)
