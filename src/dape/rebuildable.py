"""Modules that record their constructor arguments, so that their parameters can be reset."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from typing import Self  # typing has it from Python 3.11 on


class Rebuildable(nn.Module):
    """A module whose `reset_parameters` builds it again with the same arguments.

    The initialisation by the constructor, such as an identity, is also that of a reset.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        object.__setattr__(self, "_built_with", (args, kwargs))
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset the parameters to those of a newly built module."""
        args, kwargs = self._built_with  # type: ignore[misc]  # set by __new__, for nn.Module any attribute
        with torch.device("cpu"):
            new = type(self)(*args, **kwargs)
        fresh = {**dict(new.named_parameters()), **dict(new.named_buffers())}
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            # transformers marks parameters loaded from a checkpoint.
            if not getattr(tensor, "_is_hf_initialized", False):
                tensor.copy_(fresh[name])


def constructor_parameters(cls: type[nn.Module]) -> list[str]:
    """Names of the arguments of a module's constructor."""
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
