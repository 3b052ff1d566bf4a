"""A finding at the line where PyTorch raised, what the user's lines read, and where that was assigned."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.autograd.errors.raised import Raised, statement_at
from torchdebug_magics.instruments.autograd.named import cell_files
from torchdebug_magics.instruments.autograd.report import Finding
from torchdebug_magics.probing.source.call_sites import tree_of, value_of
from torchdebug_magics.probing.where import excerpt, location

if TYPE_CHECKING:
    from torchdebug_magics.report import Location

__all__ = ["assigned_before", "finding_at", "values_read"]


def finding_at(raised: Raised, headline: str, fix: str, *, where: Location | None = None, **more: object) -> Finding:
    """At `where`, else at the line that raised."""
    at = where or raised.here
    return Finding(
        kind=raised.kind,
        raised=True,
        headline=headline,
        location=at,
        fix=fix,
        excerpt=excerpt(at) if at is not None else (),
        **more,  # type: ignore[arg-type]
    )


def values_read(raised: Raised) -> list[tuple[Location, str, object]]:
    """(line, code, value) of the variables and attributes that each of the user's lines reads, the innermost line first."""
    return [
        (place, ast.unparse(node), value_of(node, frame))
        for frame, place in zip(raised.frames, raised.places, strict=True)
        for node in ast.walk(statement_at(place) or ast.Pass())
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load)
    ]


def assigned_before(raised: Raised, name: str | None) -> Location | None:
    """The last assignment to the variable before the error, by the text; else the last of an earlier cell."""
    here = raised.here
    for file in dict.fromkeys([*([here.file] if here is not None else ()), *reversed(cell_files())]):
        tree = tree_of(file)
        lines = [
            node.lineno
            for node in (ast.walk(tree) if tree is not None else ())
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets)
        ]
        before = [line for line in lines if here is None or file != here.file or line <= here.line]
        if before:
            return location(file, max(before), "<module>")
    return None
