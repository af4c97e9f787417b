"""What makes a short retrofit of models/rope work, one change at a time: tried.csv.gz, the table of docs/retrofit.md.

    python results/retrofit/tried.py             # all arms, or those named; finished ones are kept
    python results/retrofit/tried.py kerple nope

One seed, 60 steps of 2,048 tokens, on a clone with `make setup`; a minute of one core each.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import dape
from dape.data import open_data, prepare
from dape.evaluation.table import join, read_table, write_table
from dape.loading import load_base
from dape.retrofitting import adapt, attach
from dape.retrofitting.report import BASE, UNTRAINED

HERE, MODEL, METHOD = Path(__file__).parent, "models/rope", "dape1x3-kerple"
SETTINGS: dict[str, Any] = {"steps": 60, "windows": 64, "lengths": "128,256,512,1024", "device": "cpu"}
STRETCHED = "scaling=yarn,factor=8,original_length=128"
# The default of `dape retrofit`: its windows have 512 tokens here.
YARN, AS_IT_IS = "YaRN × 8 and 1×3", "untrained"
# Changes of the settings. "heights" and "prepare" are no settings: those of Kerple at the start, and what is trained.
ARMS: dict[str, dict[str, Any]] = {
    METHOD: {},
    f"{METHOD}, learning rate 1e-3, added × 5": {"learning_rate": 1e-3, "added_rate": 5.0},
    f"{METHOD}, added × 10": {"added_rate": 10.0},
    f"{METHOD}, Kerple starts at heights 0.05 to 1": {"heights": (0.05, 1.0)},
    f"{METHOD}, windows of 256": {"train_length": 256},
    f"{METHOD}, windows of 512": {"train_length": 512},
    f"{METHOD}, layers matched for 20 of 60 steps": {"match_steps": 20},
    f"{METHOD}, layers matched for 40 of 60 steps": {"match_steps": 40},
    f"{METHOD}, half of the loss is distillation": {"distill": 0.5},
    f"{METHOD}, attention trained alone": {"trains": "attention"},
    f"{METHOD}, LoRA of rank 16, norms and embeddings": {"prepare": "lora"},
    f"{METHOD}, SSMax": {"method": f"{METHOD}[normaliser=ssmax,length=128]"},
    "kerple": {"method": "kerple"},
    "dape-kerple": {"method": "dape-kerple"},
    "dape1x3-rope": {"method": "dape1x3-rope"},
    "keyshift-kerple": {"method": "keyshift-kerple"},
    YARN: {"method": f"dape1x3-rope[{STRETCHED}]"},
    f"{YARN}, windows of 128": {"method": f"dape1x3-rope[{STRETCHED}]", "train_length": 128},
    f"{YARN}, windows of 1024": {"method": f"dape1x3-rope[{STRETCHED}]", "train_length": 1024},
    f"{YARN}, added × 5": {"method": f"dape1x3-rope[{STRETCHED}]", "added_rate": 5.0},
    f"{YARN}, added × 100": {"method": f"dape1x3-rope[{STRETCHED}]", "added_rate": 100.0},
    f"{YARN}, learning rate 1e-4": {"method": f"dape1x3-rope[{STRETCHED}]", "learning_rate": 1e-4},
    f"{YARN}, PoSE, windows of 128": {"method": f"dape1x3-rope[{STRETCHED}]", "skip_length": 1024},
    "YaRN × 8, windows of 512": {"method": f"rope[{STRETCHED}]"},
    "PoSE": {"method": "rope[scaling=linear,factor=8]", "skip_length": 1024},
    "DroPE": {"method": "nope"},
    "RoPE, windows of 512": {"method": "rope", "train_length": 512},
    "RoPE, windows of 1024": {"method": "rope", "train_length": 1024},
    "dynamic NTK, windows of 512": {"method": "rope[scaling=dynamic,factor=8,original_length=128]"},
    "base trained on, learning rate 1e-4": {"method": "rope", "learning_rate": 1e-4},
    "base trained on, learning rate 3e-4": {"method": "rope"},
    AS_IT_IS: {"method": "rope", "steps": 1, "untrained": "rope-scalings"},
}


def lora(model: nn.Module, trains: str) -> None:
    """LoRA on every linear layer of the body; what was added, norms and embeddings train whole."""
    inject_adapter_in_model(
        LoraConfig(r=16, target_modules=["query", "key", "value", "out", "up", "down"]), model
    )
    added = attach.added_parameters(model)
    for name, value in model.named_parameters():
        whole = value in added or any(part in name for part in ("norm", "embed", "lm_head"))
        value.requires_grad_(whole or "lora_" in name)


def run(name: str, work: Path) -> pd.DataFrame:
    """Rows of the table of one arm, with those of the base."""
    if not (work / "data" / "manifest.json").exists():
        prepare("python", work / "data", tokenizer=MODEL)
    folder = work / name
    if (path := folder / adapt.RESULTS).exists():
        return read_table(path)
    change = {"method": METHOD, **ARMS[name]}
    heights = change.pop("heights", attach.HEIGHTS)
    prepared = lora if change.pop("prepare", None) else adapt.set_trainable
    known = next(work.glob(f"*/{adapt.LOSSES}"), None)
    folder.mkdir(parents=True, exist_ok=True)
    if known is not None and known.parent != folder:
        # The base's losses are the same for all arms.
        shutil.copy(known, folder / adapt.LOSSES)
    with (
        mock.patch.object(attach, "HEIGHTS", heights),
        mock.patch.object(adapt, "set_trainable", prepared),
    ):
        base = load_base(MODEL, "cpu")
        data = open_data(work / "data")
        return dape.adapt(
            base.model, texts=data, window=base.window, tokenizer=MODEL, out=folder, **{**SETTINGS, **change}
        ).table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="*", metavar="ARM", help="by default all of them")
    parser.add_argument("--work", type=Path, default=Path("runs/tried"))
    options = parser.parse_args()
    out = HERE / "tried.csv.gz"
    for name in options.arms or ARMS:
        found = run(name, options.work)
        read_as_it_is = found["method"].str.endswith(UNTRAINED)
        if name == AS_IT_IS:
            found = found[read_as_it_is | (found["method"] == BASE)]
        found.loc[(found["method"] != BASE) & ~read_as_it_is, ["method", "run"]] = (name, f"{name}, seed 0")
        write_table(join([*([read_table(out)] if out.exists() else []), found]), out)
        print(name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
