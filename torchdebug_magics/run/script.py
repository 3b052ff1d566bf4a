"""A script, or a module, run as ``__main__``: what ``python train.py`` and ``python -m train`` do."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from torchdebug_magics.errors import TorchDebugError

__all__ = ["Script", "show_error"]

_NOT_THERE = 2
"""Python's exit code for a file that it cannot open."""


class Script:
    """A script or module, and the arguments it runs with."""

    def __init__(self, name: str, arguments: Sequence[str], *, is_module: bool) -> None:
        self.name = name
        self.code: CodeType | None = None
        """None until it is compiled."""
        self._arguments = list(arguments)
        self._is_module = is_module

    def run(self) -> None:
        """Run it as ``__main__`` until the process ends: threads and exit handlers look up their names there."""
        module = ModuleType("__main__")
        sys.argv[:] = [self.name, *self._arguments]
        # In the order in which Python does it: a package that holds the module sees all of this while it is imported.
        if self._is_module:
            self.code = self._of_module(module)
        else:
            self.code = self._of_file(module)
        sys.modules["__main__"] = module
        exec(self.code, vars(module))  # noqa: S102 - the user's own script

    def _of_file(self, module: ModuleType) -> CodeType:
        path = str(Path(self.name).absolute())
        importer: Any = pkgutil.get_importer(self.name)
        if importer is not None:  # a folder, or an archive, with a `__main__` in it
            _first_on_path(path)
            return self._of_spec(module, importer.find_spec("__main__"), path)
        _first_on_path(str(Path(path).resolve().parent))
        is_compiled = path.endswith(".pyc")
        loader: Any = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", path)
        vars(module).update(__file__=path, __loader__=loader, __cached__=None, __annotations__={})
        try:
            data = loader.get_data(path)
        except OSError as error:
            _stop(f"{sys.orig_argv[0]}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", _NOT_THERE)
        code: CodeType = loader.get_code("__main__") if is_compiled else loader.source_to_code(data, path)
        return code

    def _of_module(self, module: ModuleType) -> CodeType:
        try:
            spec = importlib.util.find_spec(self.name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{self.name}.__main__")
        except ModuleNotFoundError as error:
            if error.name is None or not self.name.startswith(error.name):
                raise
            spec = None
        code = self._of_spec(module, spec, self.name)
        sys.argv[0] = vars(module)["__file__"]
        return code

    def _of_spec(self, module: ModuleType, spec: ModuleSpec | None, place: str) -> CodeType:
        loader: Any = None if spec is None else spec.loader
        code: CodeType | None = None if spec is None or loader is None else loader.get_code(spec.name)
        if spec is None or code is None:
            what = f"No module named {self.name}" if self._is_module else f"can't find '__main__' module in {place!r}"
            _stop(f"{sys.executable}: {what}", 1)
        vars(module).update(
            __file__=spec.origin, __loader__=loader, __cached__=spec.cached, __package__=spec.parent, __spec__=spec, __annotations__={}
        )
        return code


def show_error(error: BaseException, script: Script, own_lines: Callable[[BaseException], Sequence[str]]) -> None:
    """Print the traceback that Python would print, without frames of this package; an error of the instrument has its own lines."""
    ask = getattr(error, "_render_traceback_", None) if isinstance(error, TorchDebugError) else None
    lines = ask() if ask is not None else own_lines(error)
    if lines:
        print(*lines, sep="\n", file=sys.stderr, flush=True)  # noqa: T201 - where Python prints a traceback
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not script.code:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _first_on_path(folder: str) -> None:
    """Put the folder first on `sys.path`, unless Python runs with ``-P``."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _stop(why: str, code: int) -> NoReturn:
    print(why, file=sys.stderr)  # noqa: T201 - as Python says it
    raise SystemExit(code)
