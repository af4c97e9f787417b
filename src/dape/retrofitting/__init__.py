"""Score processors and position encodings for the models that people have already: added, trained, saved, removed."""

from dape.retrofitting.attach import adapter_parameters, remove_retrofit, retrofit, set_trainable
from dape.retrofitting.files import load_adapter, load_retrofitted, save_adapter
from dape.retrofitting.rates import parameter_groups

__all__ = [
    "adapter_parameters",
    "load_adapter",
    "load_retrofitted",
    "parameter_groups",
    "remove_retrofit",
    "retrofit",
    "save_adapter",
    "set_trainable",
]
