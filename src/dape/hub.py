"""Names of models and tokenizers: folders, or names on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from dape.errors import out_of_memory

GGUF = ".gguf"


def not_loaded(what: str, name: str, error: Exception) -> str:
    """Error message for a name that transformers could not load: where it was searched, and the reason."""
    reason = next(iter(str(error).splitlines()), "").rstrip(" .:")
    if isinstance(error, pickle.UnpicklingError):
        reason = "its weights are a pickle that is damaged, or of more than tensors, which is not read"
    elif not isinstance(error, OSError | ValueError):
        reason = f"{type(error).__name__}: {reason}"
    if os.path.isdir(name):
        return f'no {what} in the folder "{name}": {reason}'
    return f'no {what} "{name}": there is no such folder here, and it could not be downloaded from the Hugging Face hub ({reason})'


@contextlib.contextmanager
def loading(what: str, name: str) -> Iterator[None]:
    """Turn anything a library raises about the files of a model, such as damaged weights or a pickle, into a ValueError."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        raise ValueError(not_loaded(what, name, error)) from error


@functools.cache
def hub_reachable() -> bool:
    """Whether the hub can be reached, checked within seconds; a proxy is assumed to lead there."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    endpoint = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((endpoint.hostname or "", endpoint.port or 443), timeout=3).close()
    except OSError:
        return False
    return True


def hub_options(name: str) -> dict[str, bool]:
    """Options of from_pretrained: no remote code; without the hub, the cache at once instead of five attempts."""
    offline = not os.path.isdir(name) and not hub_reachable()
    return {"trust_remote_code": False, **({"local_files_only": True} if offline else {})}


def pretrained(name: str) -> tuple[str, dict[str, Any]]:
    """Arguments of from_pretrained for a folder, a name on the hub, or a GGUF file."""
    path = Path(name)
    if path.suffix == GGUF:
        return str(path.parent), {"gguf_file": path.name}
    return name, hub_options(name)
