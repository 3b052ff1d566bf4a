"""Calls something as soon as a module is imported, and not before: what it reads of the environment may be set by who imports it."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["AfterImport"]


class AfterImport(MetaPathFinder):
    """For the time of a ``with``; called at once where the module is there, and only in the thread that opens this."""

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
        """What any other finder says, with the call behind the import."""
        if fullname != self._name:
            return None
        self._leave()
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None and threading.get_ident() == self._thread:
            loader.exec_module = self._around(loader)
        return spec

    def _around(self, loader: Any) -> Callable[[ModuleType], None]:
        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the class's own is behind it
            loader.exec_module(module)
            self._then()

        return exec_module

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
