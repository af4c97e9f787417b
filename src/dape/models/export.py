"""Export of a trained model to a folder, optionally with the code to load it without this package.

transformers loads code from a folder by `auto_map` in config.json and follows relative imports, but only between
files of one folder: so our modules are written flat, `dape.scores.conv` as `dape_scores_conv.py`, and their
imports of each other rewritten.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dape.checksums import CHECKSUMS, names_with_checksums, write_checksums
from dape.errors import install
from dape.files import replacing_folder
from dape.models.remote_code import ENTRIES, FLAT, RETROFITTED, RETROFITTED_FLAT, write_code

CARD_FILE = "README.md"
CARD = """---
library_name: transformers
tags: [dape, length-extrapolation]
---
# {method}

A model {kind} [dape](https://arxiv.org/abs/2410.04798): attention scores as feature maps.

| | |
|---|---|
{rows}

How it was trained, on what, and how it fares by input length is not in the weights: say it here.

{needs}

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
```
"""
MODULE, RETROFITTED_MODULE = "dape.models.decoder", "dape.retrofitting.auto"


def export(
    model: PreTrainedModel, folder: str | Path, *, tokenizer: Any = None, with_code: bool = False
) -> Path:
    """Write config, weights and tokenizer for `from_pretrained`; returns the folder.

    A new folder appears atomically. An existing one keeps files that no export wrote; the checksums, written last, tell
    if it was left between two models.
    with_code: include our modules; the folder then loads with `trust_remote_code=True` without `dape` installed.
    """
    folder = Path(folder)
    retrofitted = bool(getattr(model.config, "dape_retrofit", None))
    entry, module, entries = (
        (RETROFITTED_MODULE, RETROFITTED_FLAT, RETROFITTED) if retrofitted else (MODULE, FLAT, ENTRIES)
    )
    before = names_with_checksums(folder)
    with replacing_folder(folder, last=CHECKSUMS) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if with_code:
            code = {f"{_flat(name)}.py": source for name, source in sources(entry).items()}
            write_code(temporary, code, name=folder.resolve(), module=module, entries=entries)
        if not (folder / CARD_FILE).exists():
            (temporary / CARD_FILE).write_text(card(model, with_code=with_code), "utf-8")
        write_checksums(temporary)
        written = {path.name for path in temporary.iterdir()}
    for name in before - written:
        (folder / name).unlink(missing_ok=True)
    return folder


def card(model: PreTrainedModel, *, with_code: bool) -> str:
    """Model card from what the model itself knows."""
    config = model.config.get_text_config()
    retrofitted = getattr(model.config, "dape_retrofit", None) or {}
    method = retrofitted.get("method") or getattr(config, "method", "unknown")
    base = model.config._name_or_path if retrofitted else ""
    facts = {
        "method": f"`{method}`",
        "base": f"`{base}`" if base else None,
        "layers × width, heads": f"{config.num_hidden_layers} × {config.hidden_size}, {config.num_attention_heads}",
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "trained at": f"{config.max_position_embeddings} tokens"
        if getattr(config, "max_position_embeddings", None)
        else None,
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value)
    kind = "retrofitted with" if retrofitted else "made with"
    needs = "The folder holds the code." if with_code else f"`dape` has to be installed: {install('models')}."
    return CARD.format(method=method, kind=kind, rows=rows, needs=needs)


def sources(entry: str = MODULE) -> dict[str, str]:
    """Source of every module that the entries need, by name, with imports rewritten for one flat folder."""
    modules: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        if module in modules:
            continue
        source, needed = _flattened(_path(module).read_text())
        modules[module] = source
        waiting += needed
    return modules


def _flattened(source: str) -> tuple[str, list[str]]:
    """The source with relative imports in place of `from dape.a.b import …`, and the modules of ours that it imports."""
    lines, needed = source.splitlines(keepends=True), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(name.name.split(".")[0] == "dape" for name in node.names):
            raise ValueError(f'"{ast.unparse(node)}" cannot be exported: write "from dape… import …" instead')
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "dape":
            continue
        assert node.module is not None
        statements = []
        for name in node.names:
            submodule = f"{node.module}.{name.name}"
            alias = name.asname or name.name
            if _is_module(submodule):
                needed.append(submodule)
                # transformers follows "from .x import y" alone, so name something that every module has.
                statements.append(f"from .{_flat(submodule)} import __name__ as _")
                statements.append(f"from . import {_flat(submodule)} as {alias}")
            else:
                needed.append(node.module)
                statements.append(f"from .{_flat(node.module)} import {name.name} as {alias}")
        indent = " " * node.col_offset
        start, end = node.lineno - 1, node.end_lineno or node.lineno
        lines[start:end] = [
            "".join(f"{indent}{statement}\n" for statement in statements),
            *[""] * (end - start - 1),
        ]
    return "".join(lines), needed


def _flat(module: str) -> str:
    return module.replace(".", "_")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _path(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)
