"""Saving and loading of retrofitted models: a small adapter with a reference to its base, or the whole model.

An adapter is a folder: `dape_adapter.json` records the retrofit, the base and the format, `dape_adapter.safetensors` holds
the weights of score processors and encodings, `checksums.json` the checksums of both.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import logging as transformers_logging

from dape.checksums import verify_checksums, write_checksums
from dape.files import read_json, write_atomically
from dape.hub import hub_options, not_loaded
from dape.models.interface import CANON, ENCODING, SCORES
from dape.retrofitting.attach import (
    RECORD,
    Model,
    Retrofit,
    adapter_parameters,
    inner_model,
    is_added,
    is_retrofitted,
    record,
    remove_retrofit,
    retrofit,
    save_inside_peft,
)

FORMAT = 2
DESCRIPTION, WEIGHTS = "dape_adapter.json", "dape_adapter.safetensors"


def save_adapter(model: nn.Module, folder: str | Path, *, base: str | None = None) -> Path:
    """Save the added modules alone, which suffices if the base was not trained; returns the folder.

    base: path or name of the base model, by default the one it was loaded from.
    """
    plan, folder, model = record(model), Path(folder), inner_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().contiguous() for name, value in _plain_names(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    description = {
        "format": FORMAT,
        "base": base or model.config._name_or_path or None,
        "model_type": model.config.model_type,
        "class": type(model).__name__,
        "retrofit": asdict(plan),
    }
    write_atomically(folder / DESCRIPTION, json.dumps(description, indent=2) + "\n")
    write_checksums(folder, [DESCRIPTION, WEIGHTS])
    return folder


def _plain_names(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the added modules by their names without PEFT; of `modules_to_save`, PEFT's trained copies."""
    tensors: dict[str, Tensor] = {}
    for name, value in adapter_parameters(model).items():
        if ".original_module." in name:
            continue
        plain = re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)
        if plain in tensors:
            raise ValueError(
                f"{plain} has a copy for each of several adapters of PEFT: delete all but one (delete_adapter) first"
            )
        tensors[plain] = value
    return tensors


def load_adapter(model: Model, folder: str | Path) -> Model:
    """Retrofit the model with the adapter in a folder; if it is retrofitted the same way already, load its weights."""
    folder, inner = Path(folder), inner_model(model)
    verify_checksums(folder)
    description = _describe(folder)
    plan = Retrofit(**description["retrofit"])
    if description["model_type"] != inner.config.model_type:
        raise ValueError(
            f"the adapter in {folder} belongs to a {description['model_type']} model, not to a "
            f"{inner.config.model_type}: load it onto {description['base'] or 'the base it was trained on'}"
        )
    try:
        weights = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged ({error}): save the adapter again") from error
    if not is_retrofitted(inner):
        _again(inner, plan, str(folder))
    else:
        _check_same(plan, record(inner), str(folder))
    _fill(inner, weights, str(folder))
    return model


def load_retrofitted(folder: str | Path, **options: Any) -> PreTrainedModel:
    """A retrofitted model, from an adapter's folder or from one that `save_pretrained` wrote.

    A folder that also holds an adapter of PEFT (LoRA first, then `retrofit`) gives the PEFT model around it.

    options: of from_pretrained, such as dtype and device_map.
    """
    folder = Path(folder)
    if folder.is_dir():
        verify_checksums(folder)
    if (folder / DESCRIPTION).exists():
        description = _describe(folder)
        base = description["base"]
        if not base:
            raise ValueError(
                f"the adapter in {folder} does not say where its base is: load the base, then "
                f"dape.load_adapter(model, {str(folder)!r})"
            )
        try:
            model = _class(description.get("class")).from_pretrained(base, **{**hub_options(base), **options})
        except OSError as error:
            raise ValueError(
                f"the adapter in {folder} needs its base: {not_loaded('model', base, error)}"
            ) from error
        return _with_peft(load_adapter(model, folder), folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; download a model of the hub into one first")
    # transformers would report our tensors as unexpected; they are read right after.
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        # Not by the code in the folder's auto_map, which leads here.
        options = {**hub_options(str(folder)), **options, "trust_remote_code": False}
        names = read_json(folder / "config.json").get("architectures") or [None]
        model = _class(names[0]).from_pretrained(folder, **options)
    finally:
        transformers_logging.set_verbosity(verbosity)
    if not (added := getattr(model.config, RECORD, None)):
        raise ValueError(f"{folder} holds neither an adapter ({DESCRIPTION}) nor a retrofitted model")
    _again(model, Retrofit(**added), str(folder))
    _fill(model, _own_tensors(folder, model), str(folder))
    return model


def _class(name: str | None) -> Any:
    """The class of transformers with that name; of causal language models, the one that their type asks for."""
    known = None if name is None else getattr(transformers, name, None)
    return known if name and known and not name.endswith("ForCausalLM") else AutoModelForCausalLM


def _with_peft(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model, wrapped by PEFT if the folder also holds a PEFT adapter."""
    if not (folder / "adapter_config.json").exists():
        return model
    from peft import PeftModel

    wrapped = PeftModel.from_pretrained(model, folder)
    save_inside_peft(wrapped)
    return cast(PreTrainedModel, wrapped)


def describes_retrofit(folder: Path) -> bool:
    """Whether a folder holds an adapter of ours, or a retrofitted model saved by `save_pretrained` or Trainer."""
    if (folder / DESCRIPTION).exists():
        return True
    config = folder / "config.json"
    return config.is_file() and bool(read_json(config).get(RECORD))


def _again(model: PreTrainedModel, plan: Retrofit, source: str) -> None:
    """Rebuild a saved retrofit; without the self-test, which passed when it was created."""
    try:
        retrofit(model, plan.method, width=plan.width, zero_init=plan.zero_init, self_test=False)
    except TypeError as error:
        raise ValueError(f"the retrofit in {source} cannot be built again: {error}") from error
    if (now := record(model)).num_heads != list(plan.num_heads):
        remove_retrofit(model)
        raise ValueError(
            f"the adapter in {source} was made for layers of {plan.num_heads} heads, the model has {now.num_heads}: load "
            f"its base"
        )


def _check_same(saved: Retrofit, now: Retrofit, source: str) -> None:
    """Raise if an adapter's weights were trained in another retrofit; options without weights change outputs too."""
    for name in ("method", "width", "num_heads"):
        theirs, ours = getattr(saved, name), getattr(now, name)
        if theirs != ours:
            raise ValueError(
                f"the adapter in {source} was made with {name}={theirs!r}, the model is retrofitted with {ours!r}: "
                f"load it onto the model without a retrofit (dape.remove_retrofit), or retrofit as the adapter was"
            )


def _describe(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no adapter: there is no {DESCRIPTION} in it")
    try:
        description = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}: copy or save the adapter again") from error
    if description.get("format") != FORMAT:
        here = f"this version of dape reads format {FORMAT}: load it with the version that wrote it"
        raise ValueError(f"the adapter in {folder} has format {description.get('format')}, {here}")
    return description


@torch.no_grad()
def _fill(model: PreTrainedModel, tensors: dict[str, Tensor], source: str) -> None:
    own = adapter_parameters(model)
    wrong = sorted(own.keys() ^ tensors.keys()) or [
        name for name, value in own.items() if value.shape != tensors[name].shape
    ]
    if wrong:
        raise ValueError(
            f"the adapter in {source} does not fit what was added to this model, first at {wrong[0]}"
        )
    for name, value in own.items():
        value.copy_(tensors[name])


def _own_tensors(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the added modules in the safetensors files of a saved model, by their names in the model.

    transformers saves some models, such as ViT, under the names of an older version: layers then match in order.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            tensors.update({name: file.get_tensor(name) for name in names if is_added(name)})
    own = adapter_parameters(model).keys()
    if own == tensors.keys() or len(own) != len(tensors):
        return tensors
    return {
        name: tensors[saved]
        for name, saved in zip(*(sorted(x, key=_by_layer) for x in (own, tensors)), strict=True)
    }


def _by_layer(name: str) -> list[tuple[int, str]]:
    """Sorting key: by the numbers of layers, then by the name inside the added module."""
    outside, part, inside = re.split(rf"\.({SCORES}|{ENCODING}|{CANON})\.", name)
    return [*((int(number), "") for number in re.findall(r"\d+", outside)), (0, part + inside)]
