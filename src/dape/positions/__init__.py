"""Position encodings: one file each, one line each in the registry below."""

from __future__ import annotations

from dape.positions.alibi import ALiBi
from dape.positions.base import DistanceEncoding, PositionEncoding, Positions
from dape.positions.cope import CoPE
from dape.positions.fire import FIRE
from dape.positions.fox import DataAlibi, FoX
from dape.positions.grid import Grid
from dape.positions.kerple import Kerple, KerplePower
from dape.positions.nope import NoPE
from dape.positions.pope import PoPE
from dape.positions.randomized import randomized_positions
from dape.positions.relative import Relative
from dape.positions.rope import RoPE
from dape.positions.rope_id import RoPEID
from dape.positions.sandwich import Sandwich
from dape.positions.selective_rope import SelectiveRoPE
from dape.positions.selfextend import SelfExtend
from dape.positions.sinusoidal import Sinusoidal
from dape.positions.t5 import T5Bias
from dape.positions.transformer_xl import TransformerXL
from dape.rebuildable import constructor_parameters
from dape.settings import check_counts

__all__ = [
    "FIRE", "POSITIONS", "ALiBi", "CoPE", "DataAlibi", "DistanceEncoding", "FoX", "Grid", "Kerple",
    "KerplePower", "NoPE", "PoPE", "PositionEncoding", "Positions", "Relative", "RoPE", "RoPEID",
    "Sandwich", "SelectiveRoPE", "SelfExtend", "Sinusoidal", "T5Bias", "TransformerXL", "build_position",
    "randomized_positions",
]  # fmt: skip

POSITIONS: dict[str, type[PositionEncoding]] = {
    "nope": NoPE,
    "sinusoidal": Sinusoidal,
    "rope": RoPE,
    "rope-id": RoPEID,
    "selective-rope": SelectiveRoPE,
    "pope": PoPE,
    "selfextend": SelfExtend,
    "t5": T5Bias,
    "alibi": ALiBi,
    "kerple": Kerple,
    "kerple-power": KerplePower,
    "sandwich": Sandwich,
    "fire": FIRE,
    "cope": CoPE,
    "transformer-xl": TransformerXL,
    "relative": Relative,
    "fox": FoX,
    "data-alibi": DataAlibi,
}


def build_position(
    name: str, *, num_heads: int, head_dim: int, hidden_size: int, **options: object
) -> PositionEncoding:
    """Build the encoding registered as `name`; its constructor receives the model sizes that it declares."""
    encoding = POSITIONS[name]
    parameters = constructor_parameters(encoding)
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "hidden_size": hidden_size}
    unknown = [option for option in options if option not in parameters or option in sizes]
    if unknown:
        valid = ", ".join(option for option in parameters if option not in sizes) or "none"
        raise ValueError(f'"{name}" has no option {", ".join(unknown)}; its options: {valid}')
    taken = {size: value for size, value in sizes.items() if size in parameters}
    check_counts(**taken)
    return encoding(**taken, **options)
