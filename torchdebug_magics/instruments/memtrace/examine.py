"""``%memtrace --compare a b``: two reports side by side."""

from __future__ import annotations

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.memtrace.report import Comparison, MemtraceReport


def examine(context: CellContext, *values: object, compare: bool = False, **_of_a_session: object) -> Comparison | None:
    """Compare two reports; without values and ``--compare`` there is nothing to do."""
    if not compare:
        if not values:
            return None
        msg = "memtrace takes values only with --compare: write `%memtrace --compare a b`"
        raise TorchDebugError(msg)
    reports = [value for value in values if isinstance(value, MemtraceReport)]
    if len(reports) != len(values) or len(reports) != 2:  # noqa: PLR2004 - two are compared
        given = ", ".join(type(value).__name__ for value in values) or "nothing"
        msg = f"--compare takes two reports of %%memtrace, kept with `-o a` and `-o b`, not {given}: write `%memtrace --compare a b`"
        raise TorchDebugError(msg)
    names = context.names
    first, second = names if len(names) == len(reports) and names[0] != names[1] else ("a", "b")
    return Comparison(names=(first, second), reports=(reports[0], reports[1]))
