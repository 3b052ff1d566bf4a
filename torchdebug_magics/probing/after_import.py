"""Calls a function as soon as a module is imported, and not before: the importing code may set the environment that the module reads."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any, Self


class AfterImport(MetaPathFinder):
    """Calls `then` after the first import in a ``with`` block, or at once if it is imported already; only in the same thread."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        if self._name in sys.modules:
            self._then()
        else:
            sys.meta_path.insert(0, self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave()

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002 - as a finder
        """Return the spec of the other finders, with the call added after the module's execution."""
        if fullname != self._name:
            return None
        self._leave()
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None and threading.get_ident() == self._thread:
            loader.exec_module = self._around(loader)
        return spec

    def _around(self, loader: Any) -> Callable[[ModuleType], None]:
        behind = loader.exec_module  # the class's own, or that of an outer session

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            behind(module)
            self._then()

        return exec_module

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
