"""A cell that only computes: which of its variables are NaN at its end, and the statements that made them, to be run once more."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils.data import Dataset

from torchdebug_magics.instruments.nanhunt.rerun.runnable_code import Drawn, runnable
from torchdebug_magics.instruments.nanhunt.rerun.step_slice import Slice
from torchdebug_magics.instruments.nanhunt.rerun.step_statements import draws
from torchdebug_magics.probing.source import syntax
from torchdebug_magics.probing.source.code_owner import local_values
from torchdebug_magics.probing.source.where import span
from torchdebug_magics.probing.tensors import NAN, kind_of, tensors_in

_MOST_S = 10.0
"""A cell that took longer is not run again."""
_EXPECTING = frozenset({"isnan", "isfinite", "nan_to_num", "nan_to_num_", "nanmean", "nansum", "nanmedian", "nanquantile", "equal_nan"})
_LOOKED_INTO = frozenset({torch.Tensor, tuple, list, dict})


class Computed:
    """The statements of the user's under the magic, or inside the `with`."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._where = span(frame.f_code, frame.f_lasti) or (frame.f_lineno or 0, -1, frame.f_lineno or 0, -1)
        self._began_s = time.perf_counter()

    def bad(self) -> tuple[str, ...]:
        """Variables bound here that hold a NaN nobody in the cell reckons with; none where it took too long to be run again."""
        statements = self._statements()
        if time.perf_counter() - self._began_s > _MOST_S or not statements:
            return ()
        names, expected = self._names(), _expected(statements)
        bound = (name for name in sorted(syntax.bound_names(*statements) - expected) if not name.startswith("_"))
        return tuple(name for name in bound if any(kind_of(tensor) & NAN for tensor in self.results_in(names.get(name))))

    @staticmethod
    def results_in(value: Any) -> Iterator[torch.Tensor]:
        """The tensors of a variable, or of an object of the user's own class, such as a metric that adds up what it is told."""
        if type(value) in _LOOKED_INTO:
            yield from tensors_in(value)
        elif type(value).__module__ == "__main__" and not isinstance(value, (torch.nn.Module, Dataset)):
            yield from tensors_in([held for held in getattr(value, "__dict__", {}).values() if type(held) in _LOOKED_INTO])

    def slice(self, wanted: tuple[str, ...]) -> Slice | None:
        """What made these variables; None where it takes from an iterator, or reads what is not there any more."""
        names = self._names()
        objects = {name for name in wanted if type(names[name]) not in _LOOKED_INTO}
        statements = self._statements()
        made = syntax.leading_to(
            statements, set(wanted), lambda statement, needed: syntax.makes(statement, needed) or _tells(statement, objects)
        )
        kept = [statements[place] for place in made][::-1]
        if not kept or any(map(draws, kept)) or syntax.read_before_bound(kept) & syntax.bound_names(*kept):
            return None
        code, given = runnable(kept, self._frame, 0, Drawn(kept, names, 0), wanted)
        return Slice(code, {**names, **given}, tuple(kept), {name: names[name] for name in wanted})

    def _names(self) -> dict[str, Any]:
        return {**self._frame.f_globals, **local_values(self._frame)}

    def _statements(self) -> list[ast.stmt]:
        lists = syntax.lists_around(syntax.tree_of(self._frame.f_code.co_filename), self._where)
        if not lists:
            return []
        body, place = lists[0]
        opened = body[place]
        return opened.body if isinstance(opened, (ast.With, ast.AsyncWith)) else body[place + 1 :]


def _tells(statement: ast.stmt, objects: set[str]) -> bool:
    """Whether it calls a method of an object for what that does, as ``metric.add_batch(scores)``."""
    return any(isinstance(node.value, ast.Call) and syntax.root_of(node.value) in objects for node in syntax.nodes(ast.Expr, statement))


def _expected(statements: list[ast.stmt]) -> set[str]:
    """Variables that are asked whether they are NaN, or given to what leaves NaN out."""
    return syntax.names_in(*(call for call in syntax.nodes(ast.Call, *statements) if syntax.method(call) in _EXPECTING))
