"""``%memtrace --compare a b``: two reports that were kept with ``-o``."""

from __future__ import annotations

from collections.abc import Sequence

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.memtrace.comparison import Comparison
from torchdebug_magics.instruments.memtrace.report import MemtraceReport

__all__ = ["compared"]


def compared(*values: object, names: Sequence[str] = (), compare: bool = False, **_of_a_session: object) -> Comparison:
    """`names` are those of the values, where they are known."""
    if not compare:
        msg = "memtrace looks at values only to compare two reports: write `%memtrace --compare a b`"
        raise TorchDebugError(msg)
    reports = [value for value in values if isinstance(value, MemtraceReport)]
    if len(reports) != len(values) or len(reports) != 2:  # noqa: PLR2004 - two are compared
        given = ", ".join(type(value).__name__ for value in values) or "nothing"
        msg = f"--compare takes two reports of %%memtrace, kept with `-o a` and `-o b`, not {given}"
        raise TorchDebugError(msg)
    first, second = names if len(names) == len(reports) and names[0] != names[1] else ("a", "b")
    return Comparison(names=(first, second), reports=(reports[0], reports[1]))
