"""Act on a module of another package as soon as it has been imported, however late that is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]

Action = Callable[[], None]


def when_imported(module: str, action: Action) -> None:
    """Call `action` right after `module` has been executed, before its importer goes on; at once if it has been.

    What `action` raises comes out of the import statement. Actions of one module run in the order they were given.
    Raises ImportError where it is too late to be told: the import of `module` is under way, and began before.
    """
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)
    if module in sys.modules and (finder is None or module not in finder.executing):
        if getattr(sys.modules[module].__spec__, "_initializing", False):
            raise ImportError(f"{module} is being imported already: call evenpipe.megatron.install() before that")
        action()
        return
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.actions.setdefault(module, []).append(action)


class _Finder(MetaPathFinder):
    """Lets the other finders find a module that somebody waits for, and puts a loader of ours around theirs.

    To be found is not to be imported: actions stay until a module has been executed.
    """

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}
        self.executing: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.actions:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def act(self, module: str) -> None:
        """Do what was to be done, also what actions themselves add to it."""
        while actions := self.actions.get(module):
            actions.pop(0)()
        self.actions.pop(module, None)


class _Loader(Loader):
    """Loads as `loader` does, puts that back into its place, and has `finder` act."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._finder.executing.add(name)
        try:
            self._loader.exec_module(module)
            self._finder.act(name)
        finally:
            self._finder.executing.discard(name)
