"""Try the oldest versions that pyproject.toml allows: a fresh environment with every floor, then a few tests.

python packaging/oldest.py ENVIRONMENT [--extras models,lab,train] [--instead torch==2.13.0] [--tests tests/hf/test_citizen.py …]

`--instead` replaces a floor that cannot be had (a torch wheel that is not on the machine, for instance): what is then
installed is printed, and only that was tried.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
TESTS = ["tests/models", "tests/positions", "tests/scores", "tests/hf/test_citizen.py"]
TESTS += ["tests/hf/test_retrofit.py", "tests/hf/test_retrofit_positions.py"]
TESTS += ["tests/hf/test_tools_that_wrap_layers.py", "tests/hf/test_shapes_that_vary.py"]


def floors(extras: list[str]) -> dict[str, str]:
    """name → "name==floor" of the dependencies and of those extras; names without a floor are left to pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    waiting = list(extras)
    while waiting:
        for requirement in project["optional-dependencies"][waiting.pop()]:
            if own := re.fullmatch(r"dape\[(.*)\]", requirement):
                waiting += own[1].split(",")
            else:
                wanted.append(requirement)
    oldest = {}
    for requirement in wanted:
        name, floor = re.fullmatch(r"([\w.-]+)(?:>=([\w.]+))?.*", requirement).groups()
        oldest[name] = f"{name}=={floor}" if floor else name
    return oldest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", type=Path)
    parser.add_argument("--extras", default="models,lab,train")
    parser.add_argument("--instead", nargs="*", default=[], help="requirements in place of their floors")
    parser.add_argument("--tests", nargs="*", default=TESTS)
    options = parser.parse_args()
    wanted = floors(options.extras.split(","))
    for requirement in options.instead:
        wanted[re.match(r"[\w.-]+", requirement)[0]] = requirement
    venv.create(options.environment, with_pip=True)
    python = str(options.environment / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    install = [python, "-m", "pip", "install", "--quiet"]
    print("installing", *sorted(wanted.values()), flush=True)
    # torch by itself: floors that exclude each other then show before gigabytes are fetched again.
    subprocess.run([*install, wanted["torch"]], check=True)
    subprocess.run([*install, "pytest", *wanted.values()], check=True)
    subprocess.run([*install, "--no-deps", str(ROOT)], check=True)
    code = "import sys, torch, transformers; print(sys.version.split()[0], torch.__version__, transformers.__version__)"
    subprocess.run([python, "-c", code], check=True)
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *options.tests]
    sys.exit(subprocess.run(tests, cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
