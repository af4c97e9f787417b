"""Makes transformers know our models after `import dape` alone, without importing transformers for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# Every way to a model by name leads through this module of transformers.
WATCHED = "transformers.models.auto.configuration_auto"


def register_with_transformers() -> None:
    """Register our configuration now if transformers' registry is loaded, else as soon as it is."""
    if WATCHED in sys.modules:
        _register()
    elif not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport())


class AfterImport(MetaPathFinder):
    """Finds the watched module as the path does, and registers once its code has run; then it steps aside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    from dape.models.auto import register_config

    register_config()
