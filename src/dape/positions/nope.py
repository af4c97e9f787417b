"""NoPE: no position encoding at all (Kazemnejad et al. 2023); causality alone tells order."""

from dape.positions.base import PositionEncoding


class NoPE(PositionEncoding):
    """Every hook the identity."""

    summary = "no position encoding; the causal mask alone tells order"
    reference = "Kazemnejad et al. 2023, arXiv 2305.19466"
