"""Every exception this package raises on purpose.

    Exception
    └── TorchDebugError            wrong use of the API; the message says the repair
        ├── SessionError           a session entered twice, or read before its end
        ├── DeterminismError       --strict: what cannot be run twice, at the line that does it
        └── NonFiniteError         the finding of a nanhunt; stops the cell it was found in

Wrong use of a magic is IPython's own ``UsageError``. A failure of our own inside a callback is never raised: it becomes one
line of ``report.problems``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.report import own_traceback

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchdebug_magics.instruments.nanhunt.report import Finding
    from torchdebug_magics.report import Location

__all__ = ["DeterminismError", "NonFiniteError", "SessionError", "TorchDebugError"]


class TorchDebugError(Exception):
    """Base of all errors raised here on purpose."""


class SessionError(TorchDebugError):
    """A session was used out of order."""


class DeterminismError(TorchDebugError):
    """Code that is to run twice does what a second run cannot find, or do, as the first one did."""


class NonFiniteError(TorchDebugError):
    """A NaN or an infinity was born; the message is the verdict.

    ``finding`` is the pure record, ``bad`` maps names such as ``"input 0"`` and ``"output"`` to the detached tensors at the birth,
    ``calls`` are the lines of the user's that led to it, the outermost first.
    """

    def __init__(self, verdict: str, finding: Finding, bad: Mapping[str, object], calls: Sequence[Location] = ()) -> None:
        super().__init__(verdict)
        self.finding = finding
        self.bad = bad
        self.calls = tuple(calls)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of the traceback: the user's own calls, as in every report, then the verdict."""
        return own_traceback(self.calls, f"{type(self).__name__}: {self}")
