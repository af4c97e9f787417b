"""Code files saved with a model's weights, from which transformers loads our classes (`trust_remote_code=True`).

`auto_map` in config.json points to them. With this package installed, the file imports the classes from it; a model
that was itself loaded from code in a folder copies that code.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

# One module for all entries, the configuration included: transformers copies the code once per entry module,
# and the operators in it must be registered with torch only once.
ENTRIES = {
    "AutoConfig": "DapeConfig",
    "AutoModel": "DapeModel",
    "AutoModelForCausalLM": "DapeForCausalLM",
    "AutoModelForSequenceClassification": "DapeForSequenceClassification",
    "AutoModelForTokenClassification": "DapeForTokenClassification",
}
# Module of the entries: as exported code, and as imports from the installed package.
FLAT, IMPORTING = "dape_models_decoder", "dape_from_package"
IMPORTS = f'"""Our classes, from the installed package."""\n\nfrom dape.models import {", ".join(ENTRIES.values())}\n'
# Entries of a retrofitted third-party model, which keeps its own configuration class.
RETROFITTED = {"AutoModelForCausalLM": "RetrofittedCausalLM"}
RETROFITTED_FLAT = "dape_retrofitting_auto"
RETROFITTED_IMPORTS = '"""The loader, from the installed package."""\n\nfrom dape.retrofitting.auto import RetrofittedCausalLM\n'


def write_entries(folder: Path, *, retrofitted: bool = False) -> None:
    """Add `auto_map` and the code it points to, in a folder written by `save_pretrained`.

    retrofitted: the folder holds a third-party model changed by `dape.retrofit`.
    """
    entries, imports, module = (
        (RETROFITTED, RETROFITTED_IMPORTS, RETROFITTED_FLAT) if retrofitted else (ENTRIES, IMPORTS, FLAT)
    )
    if __name__.startswith("dape."):
        name_entries(folder, IMPORTING, entries)
        (folder / f"{IMPORTING}.py").write_text(imports)
        return
    code = {path.name: path.read_text() for path in Path(__file__).parent.glob("dape_*.py")}
    write_code(folder, code, module=module, entries=entries)


def write_code(
    folder: Path,
    code: dict[str, str],
    *,
    name: Path | None = None,
    module: str = FLAT,
    entries: dict[str, str] = ENTRIES,
) -> None:
    """Write our modules as flat files into a saved model's folder.

    code: source by file name.
    name: final path of the folder, if it will be moved.
    """
    text = name_entries(folder, module, entries)
    (folder / f"{IMPORTING}.py").unlink(missing_ok=True)
    # torch registers operators by name: two models in one process need distinct names.
    namespace = "dape_" + hashlib.sha256((str(name or folder.resolve()) + text).encode()).hexdigest()[:12]
    for file, source in with_all_named(code, f"{module}.py").items():
        (folder / file).write_text(re.sub(r'"dape(_[0-9a-f]{12})?::', f'"{namespace}::', source))


def with_all_named(code: dict[str, str], entry: str) -> dict[str, str]:
    """The code, with an entry that imports every file directly: some versions of transformers copy no others.

    Those imports are never executed: transformers finds them in the text.
    """
    others = [file.removesuffix(".py") for file in sorted(code) if file != entry]
    listing = "".join(f"    from .{name} import __name__ as _\n" for name in others)
    if not others or listing in code[entry]:
        return code
    return {**code, entry: f"{code[entry]}\n\nif False:\n{listing}"}


def name_entries(folder: Path, module: str, entries: dict[str, str] = ENTRIES) -> str:
    """Write `auto_map` into config.json, pointing to `module`; returns the text of the file."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {auto: f"{module}.{name}" for auto, name in entries.items()}
    text = json.dumps(config, indent=2) + "\n"
    path.write_text(text)
    return text
