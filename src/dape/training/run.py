"""A run: a folder with its configuration, metrics, checkpoints and, once trained, a Hugging Face model.

run.json  metrics.jsonl  checkpoints/  model/

The folder of a trained run can itself be loaded by from_pretrained: see make_loadable.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from dape import __version__
from dape.checksums import CHECKSUMS, file_digest, save_checksums, write_checksums
from dape.data import TokenData, open_data, prepare
from dape.files import WRITING, check_output, read_json, write_atomically
from dape.plugins import LOADED, loaded_imports
from dape.training.checkpoint import Checkpoints, check_same_run, gather, locked
from dape.training.config import FitResult, TrainConfig, check_memory, checked
from dape.training.display import Record, read_metrics
from dape.training.loop import OnStep, derive_seed, fit, initialise
from dape.training.parallel import Parallel, check_precision, processes
from dape.training.trackers import find_trackers

if TYPE_CHECKING:
    # transformers takes seconds to import: functions import it, so that a command line is parsed without.
    from dape.models import DapeForCausalLM

VALIDATION_WINDOWS = 64


@dataclass(eq=False)
class LanguageModelling:
    """Mean cross-entropy of `train_length` next tokens in each of `batch_size` windows.

    ids: all documents concatenated, an array that may be memory-mapped. A window starts anywhere, and so may
    cross the end of a document. The windows of a step depend on seed and step alone.
    validation: held-out documents, concatenated; the validation loss is measured on evenly spaced windows.
    """

    model: nn.Module
    ids: np.ndarray
    _: KW_ONLY
    train_length: int
    batch_size: int
    seed: int = 0
    validation: np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(self.ids) <= self.train_length:
            raise ValueError(
                f"the training split has {len(self.ids)} tokens, train_length={self.train_length} needs at least "
                f"{self.train_length + 1}: use a larger corpus or a shorter training length"
            )

    def batch(self, step: int) -> Tensor:
        """Windows [batch_size, train_length + 1]."""
        draw = np.random.default_rng(derive_seed("windows", self.seed, step))
        starts = draw.integers(0, len(self.ids) - self.train_length, self.batch_size)
        return self._windows(self.ids, starts)

    def held_out(self) -> list[Tensor]:
        """Batches of fixed windows, at least 64 in all; none if the held-out text is too short."""
        if self.validation is None or len(self.validation) <= self.train_length:
            return []
        count = -(-VALIDATION_WINDOWS // self.batch_size) * self.batch_size
        starts = np.linspace(0, len(self.validation) - self.train_length - 1, count).astype(np.int64)
        return list(self._windows(self.validation, starts).split(self.batch_size))

    def _windows(self, ids: np.ndarray, starts: np.ndarray) -> Tensor:
        windows = ids[starts[:, None] + np.arange(self.train_length + 1)]
        return torch.from_numpy(windows.astype(np.int64))

    def shard(self, batch: Tensor, rank: int, world: int) -> Tensor:
        return batch.tensor_split(world)[rank]

    def size(self, batch: Tensor) -> int:
        return batch.shape[0] * (batch.shape[1] - 1)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [dape, length-extrapolation]
---
# {run.method}

A causal language model trained with [dape](https://arxiv.org/abs/2410.04798) {version}.

| | |
|---|---|
| method | `{run.method}` |
| layers × width, heads | {model.num_hidden_layers} × {model.hidden_size}, {model.num_attention_heads} |
| parameters | {parameters:,} |
| training length | {run.train_length} tokens |
| training | {run.steps} steps of {run.batch_size} windows on `{run.corpus}`, seed {run.seed} |
| tokenizer | `{run.tokenizer}` |
| loss of the last step | {loss} |

<!-- by length -->
Perplexity by input length is not part of training: `dape eval FOLDER --lengths {run.train_length},{longer} --card` measures it on
held-out text, at the training length and beyond it, and writes it here.
<!-- /by length -->

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)  # needs dape installed
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```
"""


def add_to_card(folder: Path, perplexities: Sequence[tuple[int, float, float]], about: str) -> None:
    """Write perplexities into the model card of a run: (length, perplexity, its standard error), and their description."""
    heads = " | ".join(f"{length:,}" for length, _, _ in perplexities)
    values = " | ".join(f"{value:.2f} ± {error:.2f}" for _, value, error in perplexities)
    lines = [f"Perplexity by input length, {about}:", "", f"| tokens | {heads} |"]
    lines += ["|---" * (len(perplexities) + 1) + "|", f"| perplexity | {values} |"]
    for card in (folder / "model" / "README.md", folder / "README.md"):
        if card.exists():
            head, begin, rest = card.read_text("utf-8").partition("<!-- by length -->\n")
            _, end, tail = rest.partition("<!-- /by length -->")
            if begin and end:
                write_atomically(card, "".join([head, begin, "\n".join(lines), "\n", end, tail]))


CONFIG = "run.json"
INDEX = "model.safetensors.index.json"
# Names in that file of the checksums of the text and of what was packed from it, and of the run's plug-ins.
TEXT, PACKED, IMPORTS = "text", "packed", "imports"


def checksums(data: TokenData) -> dict[str, Any]:
    """Checksums that identify a run's data: of the text, and of the tokenizer and the token ids."""
    splits = data.manifest["splits"]
    packed = {
        "tokenizer": data.manifest["tokenizer"]["sha256"],
        "training split": splits["train"]["crc32"],
        "validation split": splits["validation"]["crc32"],
    }
    return {TEXT: data.manifest["sources"]["sha256"], PACKED: packed}


@dataclass(frozen=True)
class Run:
    """A run, finished or not; `result` is set by `train`."""

    folder: Path
    config: TrainConfig
    result: FitResult | None = None

    def metrics(self) -> list[Record]:
        """One record per step: step, loss, learning_rate, gradient_norm, tokens, seconds; at intervals validation_loss."""
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def trained(self) -> bool:
        return (self.folder / "model").is_dir()

    def model(self, **position_options: Any) -> DapeForCausalLM:
        """The trained model, in evaluation mode; optionally with other options of its position encoding."""
        from dape.models import DapeForCausalLM

        if not self.trained:
            done = len(self.metrics())
            raise FileNotFoundError(
                f"the run in {self.folder} is not finished ({done} of {self.config.steps} steps): "
                f"`dape train` with the same options continues it"
            )
        changes: dict[str, Any] = {}
        if position_options:
            changes["position_options"] = {**self.config.method_and_options()[1], **position_options}
        with no_bars():
            return DapeForCausalLM.from_pretrained(self.folder / "model", **changes).eval()

    def data(self) -> TokenData:
        """Token data of the run; found if it was moved along with the run. Raises if it is not what the run read."""
        assert self.config.data is not None
        path = Path(self.config.data)
        # Next to the run, or, as in the lab, next to the folder of runs.
        moved = [self.folder.parent / "data" / path.name, self.folder.parent.parent / "data" / path.name]
        data = open_data(next((folder for folder in (path, *moved) if folder.exists()), moved[0]))
        self.check_data(data)
        return data

    def check_data(self, data: TokenData, *parts: str) -> None:
        """Raise if the text, tokenizer or splits, or those `parts` of them, are not the run's, as far as recorded.

        Where the text lies does not matter.
        """
        saved, found = read_json(self.folder / CONFIG), checksums(data)
        recorded = {TEXT: saved.get(TEXT), **saved.get(PACKED, {})}
        for part, value in {TEXT: found[TEXT], **found[PACKED]}.items():
            if part in (parts or recorded) and recorded.get(part) not in (None, value):
                raise ValueError(
                    f"{data.folder} has another {part} than the run in {self.folder} was trained with: restore the text, "
                    f"delete the packed data and pack it again with the run's tokenizer, or choose another --out for "
                    f"another run"
                )


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Load the run in a folder."""
    folder = Path(folder)
    file = folder / CONFIG
    if not file.exists():
        hint = ""
        if (folder.parent / CONFIG).exists():
            hint = f"; the run is {folder.parent}"
        elif (folder / "config.json").exists():
            hint = (
                "; it looks like a Hugging Face model, which `dape eval` and `dape lm-eval` take (hf:FOLDER)"
            )
        raise FileNotFoundError(f"{folder} is not a run folder: it has no {CONFIG}{hint}")
    saved = read_json(file)
    version = saved.pop("dape_version", __version__)
    for name in (TEXT, PACKED):
        saved.pop(name, None)
    imports = saved.pop(IMPORTS, {})
    try:
        return Run(folder, TrainConfig(**checked(saved)))
    except ValueError as error:
        if missing := [name for name, mark in imports.items() if mark not in LOADED.values()]:
            options = " ".join(f"--import {name}" for name in missing)
            raise ValueError(f"{folder}: {error}; it was trained with {options}: pass it again") from error
        if version == __version__:
            raise
        raise ValueError(
            f"{folder} was written by dape {version}, this is {__version__}, which does not take it ({error}): "
            f"install that version"
        ) from error


def train(config: TrainConfig, *, progress: bool = True, on_step: OnStep | None = None) -> Run:
    """Train or continue a run, and export the model at the end."""
    config = config.resolved()
    assert config.out is not None
    folder = Path(config.out)
    with processes(config) as parallel:
        # Fail before minutes of packing, not after.
        check_precision(config.precision, parallel.device)
        find_trackers(config.track)
        check_memory(config, device=parallel.device)
        if parallel.main:
            check_output(folder, folder=True)
            check_continues(folder, config)
        data = open_prepared(config, parallel, progress=progress)
        if parallel.main and (folder / CONFIG).exists() and not nothing_to_lose(folder):
            load_run(folder).check_data(data)
        model = build_model(config, data.tokenizer.vocab_size)
        task = LanguageModelling(
            model,
            data.train.ids,
            train_length=config.train_length,
            batch_size=config.batch_size,
            seed=config.seed,
            validation=data.validation.ids,
        )
        if parallel.main:
            imports = {IMPORTS: loaded} if (loaded := loaded_imports()) else {}
            record = {"dape_version": __version__, **checksums(data), **imports, **asdict(config)}
            write_atomically(folder / CONFIG, json.dumps(record, indent=2) + "\n")
        result = fit(task, config, folder, on_step=on_step, progress=progress)
        if result.steps == config.steps and not (folder / "model").exists():
            export_model(model, data, folder, parallel)
        parallel.wait()
    return Run(folder, config, result)


def check_options(config: TrainConfig, methods: Iterable[str]) -> None:
    """Raise for incompatible options before any work; every method is built once on the meta device."""
    from dape.models import DapeForCausalLM

    if "width" in config.score_options:
        raise ValueError("the width of the score convolution is --score-width (score_width in a file)")
    # Before models are built, which is slow for absurd sizes; under torchrun, each process checks when it starts.
    if config.distributed == "none":
        check_memory(config, weights_alone=True)
    for method in methods:
        with torch.device("meta"):
            DapeForCausalLM(replace(config, method=method).model_config(vocab_size=256))


def build_model(config: TrainConfig, vocab_size: int) -> DapeForCausalLM:
    """The model at step 0: modules that methods share start from the same values for the same seed."""
    from dape.models import DapeForCausalLM

    with torch.random.fork_rng(devices=[]):
        model = DapeForCausalLM(config.model_config(vocab_size))
    initialise(model, config.seed)
    return model


def prepare_data(config: TrainConfig, *, progress: bool) -> TokenData:
    """The packed corpus of a run."""
    assert config.data is not None
    return prepare(
        config.corpus,
        config.data,
        tokenizer=config.tokenizer,
        validation=config.validation,
        field=config.field,
        progress=progress,
    )


def open_prepared(config: TrainConfig, parallel: Parallel, *, progress: bool) -> TokenData:
    """The packed corpus; the main process packs it while the others wait."""
    assert config.data is not None
    failure: Exception | None = None
    if parallel.main:
        try:
            prepare_data(config, progress=progress)
        except (ValueError, OSError) as error:
            failure = error
    failure = parallel.agree(failure)
    if failure is not None:
        raise failure
    return open_data(config.data)


def check_continues(folder: Path, config: TrainConfig) -> None:
    """Raise if the folder holds another run."""
    if not (folder / CONFIG).exists():
        # A kill during the first write leaves a lock and a truncated file.
        if folder.exists() and any(
            p.name != ".lock" and not p.name.startswith(WRITING) for p in folder.iterdir()
        ):
            raise ValueError(f"{folder} is not a run folder: choose another --out")
        return
    run = load_run(folder)
    if not nothing_to_lose(folder):
        check_same_run(folder, vars(run.config), config)


def nothing_to_lose(folder: Path) -> bool:
    """Whether a run ended before its first checkpoint, such as by divergence; raises if it is running."""
    if (folder / "model").exists() or Checkpoints(folder / "checkpoints", keep=1).all():
        return False
    with locked(folder):
        return True


def export_model(model: DapeForCausalLM, data: TokenData, folder: Path, parallel: Parallel) -> None:
    """Write weights, configuration and tokenizer to folder/model, for from_pretrained. All processes call it."""
    from transformers import AutoTokenizer

    from dape.models import DapeForCausalLM

    tensors = gather(model.state_dict().items(), keep=parallel.main)
    if not parallel.main:
        return
    temporary = folder / ".model-writing"
    shutil.rmtree(temporary, ignore_errors=True)
    config: Any = model.config
    plain = DapeForCausalLM(config)
    plain.load_state_dict(tensors)
    data.tokenizer.save(temporary)
    special: Any = AutoTokenizer.from_pretrained(temporary)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for named in (plain.config, plain.generation_config):
            setattr(named, name, getattr(special, name))
    with no_bars():
        plain.save_pretrained(temporary)
    run = load_run(folder)
    metrics = run.metrics()
    about = {"version": __version__, "parameters": plain.num_parameters()}
    about["loss"] = f"{metrics[-1]['loss']:.3f}" if metrics else "unknown"
    card = CARD.format(run=run.config, model=config, longer=4 * run.config.train_length, **about)
    write_atomically(temporary / "README.md", card)
    write_checksums(temporary)
    make_loadable(folder, temporary)
    os.rename(temporary, folder / "model")


def make_loadable(folder: Path, model: Path) -> None:
    """Write the files that from_pretrained needs into the run's folder: copies of small files, an index of the weights.

    model: the folder that is about to become folder/model. The run's folder gets checksums of all that it loads.
    """
    known = read_json(model / CHECKSUMS)["files"]
    file_of: dict[str, str] = {}
    entries: dict[str, Any] = {}
    for file in sorted(model.iterdir()):
        if file.suffix == ".safetensors":
            entries[f"model/{file.name}"] = known[file.name]
            with safe_open(file, framework="pt") as weights:
                file_of |= dict.fromkeys(weights.keys(), f"model/{file.name}")
        elif not file.name.endswith(".index.json") and file.name != CHECKSUMS:
            write_atomically(folder / file.name, file.read_bytes())
            entries |= {file.name: known[file.name]} if file.name in known else {}
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    write_atomically(
        folder / INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": file_of}, indent=2) + "\n"
    )
    entries[INDEX] = {"sha256": file_digest(folder / INDEX), "bytes": (folder / INDEX).stat().st_size}
    save_checksums(folder, entries)


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which would mix with our own output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
