"""The body of the running cell, compiled to be rerun: the same code in the same namespace, with its output hidden."""

from __future__ import annotations

import ast
import sys
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from torchdebug_magics.jupyter.cell import running_cells

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import CodeType

    from torchdebug_magics.jupyter.cell import CellSessions

__all__ = ["CellBody"]

_RUN_CODE = InteractiveShell.run_code.__code__
_OF_PYTHON = frozenset({"time", "capture", "prun"})
"""Cell magics that run the code below them unchanged, once."""
_SHELL_COMMANDS = frozenset({"system", "getoutput"})


class CellBody:
    """The code after this package's leading magics; `run` may be called any number of times."""

    def __init__(self, shell: InteractiveShell, cells: CellSessions, magics: Collection[str]) -> None:
        source = getattr(getattr(next(running_cells(), None), "info", None), "raw_cell", None)
        if not isinstance(source, str):
            msg = "only a cell can be run a second time: in code, `torchdebug_magics.verify(function)` does it"
            raise UsageError(msg)
        self.namespace: dict[str, Any] = shell.user_ns
        self.hidden = frozenset(shell.user_ns_hidden)
        """Names in the namespace that IPython put there."""
        self.roots: tuple[object, ...] = ()
        self._cells = cells
        lines = shell.transform_cell(source)
        compiler: Any = shell.compile
        self.file = _file_of(shell)
        body = [one for one in compiler.ast_parse(lines, filename=self.file).body if not _is_magic(one, magics)]
        self.statements = tuple(body)
        named = {node.id for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)}
        self.variables = {name: value for name, value in shell.user_ns.items() if name in named - self.hidden}
        self.refusal = _wrapped(self.statements, magics) or _refusal(self.statements)
        self._code: CodeType | None = None if self.refusal else compiler(shell.transform_ast(ast.Module(body, [])), self.file, "exec")

    def left(self) -> dict[str, object]:
        """The user's namespace."""
        return {name: value for name, value in self.namespace.items() if name not in self.hidden}

    def run(self) -> None:
        """Run the body again: its exceptions propagate, its output is hidden."""
        __tracebackhide__ = True
        assert self._code is not None
        with capture_output(stdout=False, stderr=False):
            self._cells.run_cell_again(self._code)


def _file_of(shell: InteractiveShell) -> str:
    """The file name under which IPython compiled the running cell, so that line numbers agree."""
    file = ""
    frame = sys._getframe()  # noqa: SLF001 - the only door to the callers
    while frame is not None and frame.f_code is not _RUN_CODE:
        if frame.f_globals is shell.user_ns:
            file = frame.f_code.co_filename
        frame = frame.f_back  # type: ignore[assignment]  # it begins with a frame and may end with None
    return file


def _is_magic(statement: ast.stmt, magics: Collection[str]) -> bool:
    """``get_ipython().run_cell_magic('deterministic', '', None)``: as `MagicLines` writes it."""
    match statement:
        case ast.Expr(
            ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython")), "run_cell_magic"), [ast.Constant(name), *_, ast.Constant(None)])
        ):
            return name in magics
    return False


def _wrapped(statements: tuple[ast.stmt, ...], magics: Collection[str]) -> str:
    """The reason why a body run by another cell magic cannot be rerun; empty if it can."""
    for statement in statements:
        match statement:
            case ast.Expr(
                ast.Call(
                    ast.Attribute(ast.Call(ast.Name("get_ipython")), "run_cell_magic"),
                    [ast.Constant(str(name)), _, ast.Constant(str(text))],
                )
            ):
                ours = next((one for one in magics if f"%%{one}" in text.split()), None)
                if ours is not None:
                    return f"`%%{name}` is above it: write `%%{ours}` first"
                if name not in _OF_PYTHON:
                    return f"`%%{name}` runs the body, and would run it again"
    return ""


def _refusal(statements: tuple[ast.stmt, ...]) -> str:
    """The reason why the body cannot be rerun; empty if it can."""
    outside = [node for statement in statements for node in _outside_functions(statement)]
    if any(isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)) for node in outside):
        return "the cell awaits at top level"
    for node in outside:
        match node:
            case ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython")), name)) if name in _SHELL_COMMANDS:
                return "the cell runs a shell command, which a second run would repeat"
    return ""


def _outside_functions(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return []
    return [node, *(inner for child in ast.iter_child_nodes(node) for inner in _outside_functions(child))]
