"""Draw encodings into a file: `python -m dape.positions kerple fire`, or with the file's name at the end."""

import sys

from dape.positions import POSITIONS
from dape.positions.picture import draw

if __name__ == "__main__":
    files = [argument for argument in sys.argv[1:] if "." in argument]
    names = [argument for argument in sys.argv[1:] if argument not in files]
    if not names or not set(names) <= set(POSITIONS) or len(files) > 1:
        sys.exit(f"usage: python -m dape.positions NAME … [FILE.svg]; the names are {', '.join(POSITIONS)}")
    path = files[0] if files else f"{names[0]}.svg"
    draw(names).savefig(path)
    print(path)
