"""Draw what position encodings add to scores: `python -m dape.positions kerple`, or `rope kerple.svg`."""

from __future__ import annotations

import sys
from pathlib import Path

from dape.positions import POSITIONS
from dape.positions.picture import draw


def main(arguments: list[str]) -> int:
    names = [name for name in arguments if name in POSITIONS]
    files = [name for name in arguments if name not in POSITIONS]
    if not names or len(files) > 1 or any(not Path(file).suffix for file in files):
        print(f"usage: python -m dape.positions NAME … [FILE.svg]; names: {', '.join(POSITIONS)}")
        return 2
    path = Path(files[0] if files else f"{names[0]}.svg")
    draw(names).savefig(path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
