"""Files beside a saved model's weights from which transformers loads our classes by the folder alone.

config.json names them in `auto_map`. Where this package is installed, the file it leads to imports them from here;
a model that was itself loaded from code in a folder hands on that code. Both load with `trust_remote_code=True`.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

# All in one module, which names the configuration too: transformers copies the code once for every entry module,
# and torch must meet the operators that it defines only once.
ENTRIES = {
    "AutoConfig": "DapeConfig",
    "AutoModel": "DapeModel",
    "AutoModelForCausalLM": "DapeForCausalLM",
    "AutoModelForSequenceClassification": "DapeForSequenceClassification",
    "AutoModelForTokenClassification": "DapeForTokenClassification",
}
# The module of the entries where it is code in a folder, and the one that imports them from the package.
FLAT, IMPORTING = "dape_models_decoder", "dape_from_package"
IMPORTS = f'"""Our classes, from the installed package."""\n\nfrom dape.models import {", ".join(ENTRIES.values())}\n'
# Of somebody else's model that was retrofitted: its configuration is its own.
RETROFITTED = {"AutoModelForCausalLM": "RetrofittedCausalLM"}
RETROFITTED_FLAT = "dape_retrofitting_auto"
RETROFITTED_IMPORTS = '"""The loader, from the installed package."""\n\nfrom dape.retrofitting.auto import RetrofittedCausalLM\n'


def write_entries(folder: Path, *, retrofitted: bool = False) -> None:
    """Give a folder that `save_pretrained` wrote its `auto_map`, and the code that it leads to.

    retrofitted: the folder holds somebody else's model that `dape.retrofit` changed.
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
    """Write our modules, flat, by the names of their files, into a saved model's folder.

    name: the path that the folder will have.
    """
    text = name_entries(folder, module, entries)
    (folder / f"{IMPORTING}.py").unlink(missing_ok=True)
    # torch knows its operators by name: two models in one process must not share the names of theirs.
    namespace = "dape_" + hashlib.sha256((str(name or folder.resolve()) + text).encode()).hexdigest()[:12]
    for file, source in with_all_named(code, f"{module}.py").items():
        (folder / file).write_text(re.sub(r'"dape(_[0-9a-f]{12})?::', f'"{namespace}::', source))


def with_all_named(code: dict[str, str], entry: str) -> dict[str, str]:
    """The code, its entry importing every file by itself: some versions of transformers copy no others.

    Never executed: they find imports by their text.
    """
    others = [file.removesuffix(".py") for file in sorted(code) if file != entry]
    listing = "".join(f"    from .{name} import __name__ as _\n" for name in others)
    if not others or listing in code[entry]:
        return code
    return {**code, entry: f"{code[entry]}\n\nif False:\n{listing}"}


def name_entries(folder: Path, module: str, entries: dict[str, str] = ENTRIES) -> str:
    """The text of config.json, now with an `auto_map` into that module."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {auto: f"{module}.{name}" for auto, name in entries.items()}
    text = json.dumps(config, indent=2) + "\n"
    path.write_text(text)
    return text
