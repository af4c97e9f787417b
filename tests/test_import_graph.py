"""Imports between subpackages have one direction; the library never imports the papers beside it."""

import ast
import collections
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "dape"


def imported(path):
    """Modules imported anywhere in a file, also in functions and for type checking."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph(source):
    """Subpackages and top-level modules of `dape`, each with those that it imports."""
    edges = collections.defaultdict(set)
    for path in source.rglob("*.py"):
        room = path.relative_to(source).parts[0].removesuffix(".py")
        for module in imported(path):
            package, _, rest = module.partition(".")
            assert package != "papers", f"{path} imports {module}"
            target = rest.partition(".")[0]
            # `dape` itself offers everything, lazily.
            known = (source / target).is_dir() or (source / f"{target}.py").exists()
            if package == "dape" and target and known and "__init__" != room != target:
                edges[room].add(target)
    return edges


def test_subpackages_do_not_import_in_circles():
    TopologicalSorter(graph(SOURCE)).prepare()


def test_the_command_line_is_the_top_layer():
    assert {room for room, targets in graph(SOURCE).items() if "cli" in targets} <= {"__main__"}


@pytest.mark.parametrize(
    ("line", "error"), [("    from dape import b", CycleError), ("    import papers.x", AssertionError)]
)
def test_the_graph_sees_lazy_imports(line, error, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "b" / "x.py").write_text("from dape.a import y")
    (tmp_path / "a" / "y.py").write_text(f"def late():\n{line}\n")
    with pytest.raises(error):
        TopologicalSorter(graph(tmp_path)).prepare()
