"""Look inside: what attention scores, biases, processors and weights look like on a text."""

from dape.inspection.maps import MAPS, Inspection, LayerMaps, inspect

__all__ = ["MAPS", "Inspection", "LayerMaps", "inspect"]
