"""Draw encodings into a file: `python -m dape.positions kerple fire`, or with the file's name at the end."""

import sys

from dape.positions.picture import draw

if __name__ == "__main__":
    *names, path = sys.argv[1:] if "." in sys.argv[-1] else [*sys.argv[1:], f"{sys.argv[1]}.svg"]
    draw(names).savefig(path)
    print(path)
