"""The exceptions of this package.

    Exception
    └── TorchDebugError            wrong use of the API; the message names the fix
        ├── SessionError           a session entered twice, or read before its end
        ├── DeterminismError       --strict: code that cannot be rerun, with its line
        └── NonFiniteError         a finding of nanhunt; stops the cell

Wrong use of a magic is IPython's own ``UsageError``. A failure of our own inside a callback is never raised: it becomes one
line of ``report.problems``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.report import own_traceback

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchdebug_magics.instruments.nanhunt.report import NanFinding
    from torchdebug_magics.report import Location


class TorchDebugError(Exception):
    """Base class of all exceptions of this package."""


def refuse(is_wrong: object, why: str) -> None:
    """Raise a `TorchDebugError` where something is used wrongly."""
    if is_wrong:
        raise TorchDebugError(why)


def error_line(error: BaseException | None, longest: int | None = None) -> str:
    """``ValueError: ...``: the first line of what it says, cut there; empty without an error."""
    text = next(iter(str(error).strip().splitlines()), "")
    return "" if error is None else f"{type(error).__name__}: {text[:longest]}".removesuffix(": ")


class SessionError(TorchDebugError):
    """A session was used out of order."""


class DeterminismError(TorchDebugError):
    """Code under ``--strict`` does something that a second run cannot repeat."""


class NonFiniteError(TorchDebugError):
    """A NaN or an infinity was produced; the message is the verdict.

    ``finding`` is the pure record, ``bad`` maps names such as ``"input 0"`` and ``"output"`` to the detached tensors at the source op,
    ``calls`` are the user's lines that led to it, outermost first.
    """

    def __init__(self, verdict: str, finding: NanFinding, bad: Mapping[str, object], calls: Sequence[Location] = ()) -> None:
        super().__init__(verdict)
        self.finding = finding
        self.bad = bad
        self.calls = tuple(calls)

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows in place of the traceback: the user's own calls, then the verdict."""
        return own_traceback(self.calls, f"{type(self).__name__}: {self}")
