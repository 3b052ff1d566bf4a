"""Takes from one rank's shapes report what ranks are compared by."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from torchdebug_magics.ranks.compared import Compared, Moment

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.report import ShapesReport

__all__ = ["compared"]


def compared(report: ShapesReport) -> Compared:
    """A digest of the input and output shapes of each module call."""
    sizes = {f"{row.path or '(root)'} call {row.call}": _digest(f"{row.input_shapes} {row.output_shapes}") for row in report.rows}
    moments = (Moment("shapes_differ", None, _digest(str(sizes))),) if sizes else ()
    failed = report.failure or report.suspect
    return Compared(
        worked=bool(report.rows or failed),
        found_at=None if failed is None else (0, 0),
        moments=moments,
        details={("shapes_differ", None): {name.removesuffix(" call 1"): digest for name, digest in sizes.items()}} if sizes else {},
    )


def _digest(text: str) -> int:
    return zlib.crc32(text.encode())
