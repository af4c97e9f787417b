"""Score convolution for the models that people have already: added, trained, saved, removed."""

from dape.retrofitting.attach import remove_retrofit, retrofit
from dape.retrofitting.files import load_adapter, load_retrofitted, save_adapter

__all__ = ["load_adapter", "load_retrofitted", "remove_retrofit", "retrofit", "save_adapter"]
