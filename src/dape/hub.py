"""Names of models and tokenizers: folders, or names on the Hugging Face hub."""

from __future__ import annotations

import functools
import os
import socket
from urllib.parse import urlparse


def not_loaded(what: str, name: str, error: Exception) -> str:
    """Error message for a name that transformers could not load: where it was searched, and the reason."""
    reason = next(iter(str(error).splitlines()), "").rstrip(" .:")
    if os.path.isdir(name):
        return f'no {what} in the folder "{name}": {reason}'
    return f'no {what} "{name}": there is no such folder here, and the Hugging Face hub did not give it ({reason})'


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
