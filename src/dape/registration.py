"""Makes transformers and lm-eval know our models after `import dape` alone, without importing them for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def _transformers() -> None:
    from dape.models.auto import register_config

    register_config()


def _lm_eval() -> None:
    from lm_eval.api.registry import model_registry

    if "dape" not in model_registry:
        model_registry.register("dape", target="dape.harness:DapeLM")


# The module that every way to a model by name leads through, and what to do once its code has run.
REGISTRIES: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": _transformers,
    "lm_eval.models": _lm_eval,
}


def register_everywhere() -> None:
    """Register our models in the registries that are loaded, and in the others as soon as they are."""
    for name, register in REGISTRIES.items():
        if name in sys.modules:
            register()
    if not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport())


class AfterImport(MetaPathFinder):
    """Finds a registry as the path does, and registers once its code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in REGISTRIES:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            REGISTRIES[fullname]()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]  # of this one loader
        return spec
