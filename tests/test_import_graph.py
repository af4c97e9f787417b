"""Imports between subpackages have one direction; the library never imports the papers beside it."""

import ast
import collections
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from processes import python

import dape

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


IMPORTS = """
import sys, dape.cli
def loaded(*names):
    return {*names} & {*sys.modules}
def run(*arguments):
    try: dape.cli.main([*arguments])
    except SystemExit: pass
run("--help")
assert not loaded("torch")
import torch, torch.utils.checkpoint
before, finders = {name.split(".")[0] for name in sys.modules}, [*sys.meta_path, *sys.path_hooks]
from dape import ScoreAttention
q = torch.zeros(1, 2, 3, 16)
dape.attention(q, q, q, None)
assert not loaded("triton")
extra = {name.split(".")[0] for name in sys.modules} - before - {*sys.stdlib_module_names}
assert not extra, extra
assert finders == [*sys.meta_path, *sys.path_hooks]
import dape.training.run
assert not loaded("wandb", "trackio", "mlflow", "tensorboard")
"""


def test_nothing_is_imported_before_it_is_needed():
    python("-c", IMPORTS)


def test_every_name_of_the_package_is_imported_on_access():
    for name in {*dape.__all__, *(name for names in dape.NAMES.values() for name in names)}:
        assert getattr(dape, name) is not None
    tree = ast.parse((SOURCE / "__init__.py").read_text("utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    names = {(node.module, alias.name) for node in typed.body for alias in node.names}
    later = {(module, name) for module, names in dape.NAMES.items() for name in names}
    assert names - {("dape", "models")} == later
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        dape.atention  # noqa: B018
