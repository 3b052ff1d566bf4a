"""A finding at the line where PyTorch raised, and the variables that the line reads."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.autograd.errors.raised import Raised, statement_at
from torchdebug_magics.instruments.autograd.report import Finding
from torchdebug_magics.probing.where import excerpt

if TYPE_CHECKING:
    from torchdebug_magics.report import Location

__all__ = ["finding_at", "variables_read"]


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


def variables_read(raised: Raised) -> list[tuple[str, object]]:
    """The variables that the statement reads."""
    statement = statement_at(raised.here)
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} if statement is not None else set()
    return [(name, value) for name, value in raised.variables() if name in names]
