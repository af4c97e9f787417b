"""Settings of `adapt`; no import of transformers, so that `dape retrofit --help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dape.methods import split_outside_brackets
from dape.settings import SettingError, setting, split_numbers
from dape.training.config import LoopSettings

# Which parameters are trained.
Trains = Literal["all", "attention", "added"]
# New parameters take a much higher rate than pretrained ones: a convolution starts as the identity.
ADDED_RATE = 50.0
# An input cut to the window, its first tokens kept (StreamingLLM), among methods to compare with.
SINKS = "sinks"


@dataclass(frozen=True, kw_only=True)
class AdaptSettings(LoopSettings):
    """How a model is retrofitted, tuned and evaluated."""

    method: str | None = setting(
        None,
        help="Score processor and position encoding; a processor alone keeps the positions. By default the 1x3 "
        "convolution, and the model's rotation stretched (YaRN) to the longest length of the table; dape1x3-kerple for a "
        "model without rotation.",
    )
    steps: int = setting(300, help="Optimizer steps.", low=1, high=10**9)
    learning_rate: float = setting(
        3e-4, help="Peak learning rate of the base's parameters.", above=0, high=1000
    )
    final_learning_rate: float | None = setting(  # type: ignore[assignment]  # derived where it is not given
        None, help="Final learning rate; by default a twentieth of the peak.", low=0, high=1000
    )
    warmup_steps: int | None = setting(  # type: ignore[assignment]  # as above
        None, help="Steps of linear warm-up; by default 6 % of the steps.", low=0, high=10**9
    )
    weight_decay: float = setting(0.01, help="Weight decay of the base's matrices.", low=0, high=1000)
    added_rate: float = setting(
        ADDED_RATE, help="Learning-rate multiplier of the added parameters.", above=0, high=1e6
    )
    trains: Trains = setting(
        "all", help="Trainable parameters: all, those of attention layers, or added ones."
    )
    width: int = setting(32, help="Hidden channels of the score processor.", low=1, high=2**16)
    train_length: int | None = setting(
        None,
        help="Tokens of a training window; by default four times the model's training length where its rotation is stretched, "
        "else (and with skip_length) that length.",
        low=2,
        high=2**24,
    )
    batch_size: int | None = setting(
        None,
        help="Windows per step; by default as many tokens as 16 windows of the model's training length.",
        low=1,
        high=2**24,
    )
    skip_length: int | None = setting(
        None,
        help="Let the positions of a training window run up to this many tokens, with a gap drawn at random (PoSE); for "
        "methods that rotate by positions.",
        low=2,
        high=2**24,
    )
    distill: float = setting(
        0.0,
        help="Share of distillation in the loss: the divergence from the base's predictions.",
        low=0,
        high=1,
    )
    match_steps: int = setting(
        0,
        help="Number of initial steps that fit each attention layer to the output of the base's, in windows that it reads.",
        low=0,
        high=10**9,
    )
    control: bool = setting(
        False,
        help="Also train the base itself for as many steps, and cut its input: what more training alone brings.",
        fixes_run=False,
    )
    control_learning_rate: float = setting(
        1e-4,
        help="Peak learning rate of the base trained on; the default did best in our trials.",
        above=0,
        high=1000,
        fixes_run=False,
    )
    seeds: int = setting(
        1, help="Number of seeds: --seed and those after it.", low=1, high=10**6, fixes_run=False
    )
    jobs: int = setting(
        1, help="Concurrent runs, each in its own process.", low=1, high=2**10, fixes_run=False
    )
    untrained: str | None = setting(
        None,
        help="Methods to compare with without training, separated by commas, such as rope[scaling=yarn,factor=8]. sinks: "
        "the input cut to its first four and its last tokens. rope-scalings: position interpolation, NTK, dynamic NTK, "
        "YaRN, SelfExtend, ReRoPE, log-n temperature, sinks and, in our own models, a window of keys.",
        fixes_run=False,
    )
    lengths: str | None = setting(
        None,
        help="Tokens of input in the table, by commas; by default 1, 2, 4 and 8 times the model's training length.",
        listed=int,
        low=1,
        high=2**24,
        fixes_run=False,
    )
    last: int | None = setting(
        None,
        help="Tokens predicted at the end of each window of the table; by default a quarter of the model's own "
        "length, at most 64.",
        low=1,
        high=2**24,
        fixes_run=False,
    )
    windows: int = setting(
        32, help="Maximum number of windows in the table.", low=1, high=10**9, fixes_run=False
    )

    def derive(self) -> None:
        if self.final_learning_rate is None and isinstance(self.learning_rate, float | int):
            self._set(final_learning_rate=self.learning_rate / 20)
        super().derive()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.match_steps > self.steps:
            raise SettingError("match_steps", self.match_steps, f" exceeds steps={self.steps}")
        if self.skip_length is not None and (self.match_steps or self.distill):
            reason = ": a teacher reads no gaps, leave distill and match_steps out"
            raise SettingError("skip_length", self.skip_length, reason)

    def untrained_list(self, window: int, *, own: bool) -> list[str]:
        """Methods that the base's weights are read with as they are. own: the base is one of our models."""
        if self.untrained is None:
            return []
        names = split_outside_brackets(self.untrained, ",")
        factor = f"factor={max(self.length_list(window)) / window:g}"
        known = [f"rope[scaling={kind},{factor}]" for kind in ("linear", "ntk")]
        known += [f"rope[scaling={kind},{factor},original_length={window}]" for kind in ("dynamic", "yarn")]
        group = max(2, 2 * max(self.length_list(window)) // window)
        known += [f"selfextend[near={window // 2},group={group}]", f"selfextend[near={window // 2}]"]
        known += [f"rope[normaliser=ssmax,length={window}]", SINKS]
        # A retrofit of another's model keeps that model's windows.
        known += [f"rope[window={window}]"] if own else []
        return [name for given in names for name in (known if given == "rope-scalings" else [given])]

    def resolved(self, window: int, *, rotates: bool) -> AdaptSettings:
        """These settings with what depends on the model: its window, and whether it has rotary positions."""
        method, factor = self.method, max(self.length_list(window)) / window
        if method is None:
            stretched = f"dape1x3-rope[scaling=yarn,factor={factor:g},original_length={window}]"
            method = stretched if rotates and factor > 1 else "dape1x3-kerple"
        taught = self.match_steps or self.distill
        longer = "scaling=" in method and self.skip_length is None and not taught
        train_length = self.train_length or (4 * window if longer else window)
        if taught and train_length > window:
            raise SettingError(
                "train_length", train_length, f": the base, which teaches here, reads {window} tokens"
            )
        batch_size = self.batch_size or max(1, 16 * window // train_length)
        if self.skip_length is not None and self.skip_length < train_length:
            raise SettingError("skip_length", self.skip_length, f" is less than train_length={train_length}")
        return replace(self, method=method, train_length=train_length, batch_size=batch_size)

    def length_list(self, window: int) -> list[int]:
        """Lengths of the table, the window among them."""
        if self.lengths is None:
            return [window * times for times in (1, 2, 4, 8)]
        return sorted({window, *split_numbers("lengths", self.lengths)})

    def num_last(self, window: int) -> int:
        return min(64, max(1, window // 4)) if self.last is None else self.last

    def for_control(self) -> AdaptSettings:
        """Settings of the base trained on: its own learning rate, and no teacher."""
        assert self.final_learning_rate is not None
        rate, share = self.control_learning_rate, self.final_learning_rate / self.learning_rate
        return replace(
            self,
            learning_rate=rate,
            final_learning_rate=share * rate,
            match_steps=0,
            distill=0.0,
            skip_length=None,
        )
