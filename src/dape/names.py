"""Names that are folders here or stand on the Hugging Face hub."""

from __future__ import annotations

import os


def not_loaded(what: str, name: str, error: Exception) -> str:
    """The sentence for a name that transformers could not load: where it was looked for, and why it was not had."""
    reason = next(iter(str(error).splitlines()), "").rstrip(" .:")
    if os.path.isdir(name):
        return f'no {what} in the folder "{name}": {reason}'
    return f'no {what} "{name}": there is no such folder here, and the Hugging Face hub did not give it ({reason})'
