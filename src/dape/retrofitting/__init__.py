"""Retrofitting of pretrained models: add score processors and position encodings, train, save and remove them."""

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
