"""Every exception this package raises on purpose.

    Exception
    └── TorchDebugError            wrong use of the API; the message says the repair
        ├── SessionError           a session entered twice, or read before its end
        └── NonFiniteError         the finding of a nanhunt; stops the cell it was found in

Wrong use of a magic is IPython's own ``UsageError``. A failure of our own inside a callback is never raised: it becomes one
line of ``report.problems``.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchdebug_magics.instruments.nanhunt.report import Finding

__all__ = ["NonFiniteError", "SessionError", "TorchDebugError"]


_INSTALLED = re.compile(rf"/(site|dist)-packages/|^{re.escape(Path(__file__).parent.as_posix())}/")


class TorchDebugError(Exception):
    """Base of all errors raised here on purpose."""


class SessionError(TorchDebugError):
    """A session was used out of order."""


class NonFiniteError(TorchDebugError):
    """A NaN or an infinity was born; the message is the verdict.

    ``finding`` is the pure record, ``bad`` maps names such as ``"input 0"`` and ``"output"`` to the detached tensors at the birth.
    """

    def __init__(self, verdict: str, finding: Finding, bad: Mapping[str, object]) -> None:
        super().__init__(verdict)
        self.finding = finding
        self.bad = bad

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of the traceback: the user's own lines, then the verdict. Torch's frames say nothing here."""
        frames = [frame for frame in traceback.extract_tb(self.__traceback__) if not _INSTALLED.search(frame.filename.replace("\\", "/"))]
        calls = [f"  line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames]
        return [f"{type(self).__name__}, stopped at", *calls, f"{type(self).__name__}: {self}"]
