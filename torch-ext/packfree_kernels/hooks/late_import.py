"""Run a callback once a module has been imported, without importing it."""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Optional, Sequence


class _CallbackLoader(Loader):
    def __init__(self, loader: Any, callback: Callable[[], None]) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> Optional[ModuleType]:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: resources and source are read through it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback()


class ImportWatch(MetaPathFinder):
    """A finder that answers for one module name only, by asking the other finders and adding a callback."""

    def __init__(self, module_name: str, callback: Callable[[], None]) -> None:
        self._module_name = module_name
        self._callback = callback
        self._searching = False

    def start(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    @property
    def waiting(self) -> bool:
        return self in sys.meta_path

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if fullname != self._module_name or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None

        def imported() -> None:
            self.stop()
            self._callback()

        spec.loader = _CallbackLoader(spec.loader, imported)
        return spec
