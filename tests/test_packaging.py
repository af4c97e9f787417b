"""What the package says of itself is true."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_python_that_is_required_has_what_is_imported():
    """tomllib came with 3.11: experiments are TOML, so no earlier Python will do."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = re.fullmatch(r">=3\.(\d+)", project["project"]["requires-python"])
    assert required
    minor = int(required[1])
    used = {"tomllib": 11}
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, minor))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert all(used.get(name, 0) <= minor for name in names), (path, names)
    assert project["tool"]["ruff"]["target-version"] == f"py3{minor}"
    assert project["tool"]["mypy"]["python_version"] == f"3.{minor}"


def test_what_is_compiled_asks_for_types_as_the_oldest_torch_can_trace_it():
    """torch 2.9 traces isinstance(x, (A, B)), not isinstance(x, A | B)."""
    for folder in ("ops/score_attention", "positions", "scores", "models"):
        for path in (ROOT / "src/dape" / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                    assert not isinstance(node.args[1], ast.BinOp), (path.name, node.lineno)


def test_set_up_leaves_nothing_that_runs_when_python_starts():
    for name in ("setup.py", "Makefile", "pyproject.toml"):
        assert ".pth" not in (ROOT / name).read_text()
