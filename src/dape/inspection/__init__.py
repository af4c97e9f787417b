"""Inspection of attention on a text: maps of scores, bias, processed scores and weights."""

from dape.inspection.maps import MAPS, Inspection, LayerMaps, inspect

__all__ = ["MAPS", "Inspection", "LayerMaps", "inspect"]
