"""The "Relative" encoding of the CHE benchmark (Ruoss et al. 2023): Transformer-XL's, in both directions."""

from dape.positions.transformer_xl import TransformerXL


class Relative(TransformerXL):
    """Transformer-XL's encoding with signed distances; the name under which the benchmark lists it."""

    summary = "Transformer-XL's encoding under its name in CHE"
