"""The marks (``%memmark``) that are set while a cell is traced, each with what torch held then."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from torchdebug_magics.instruments.memtrace.report import TraceMark
from torchdebug_magics.probing.marks import ledger as marks

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Ledger
    from torchdebug_magics.report import Mark

__all__ = ["MarkListener", "Marked"]


class Marked(NamedTuple):
    """A mark, and where it stands among the events of the ledger."""

    mark: TraceMark
    clock: int


class MarkListener:
    """Of one cell."""

    def __init__(self, ledger: Ledger) -> None:
        self.marks: list[Marked] = []
        self._ledger = ledger
        self._stack = ExitStack()

    def attach(self, stack: ExitStack) -> None:
        """From now on."""
        stack.callback(self.stop)
        self._stack.enter_context(marks().told_to(self._set))

    def stop(self) -> None:
        """Harmless the second time."""
        self._stack.close()

    def _set(self, mark: Mark) -> None:
        ledger = self._ledger
        ledger.settle()
        self.marks.append(Marked(TraceMark(**vars(mark), torch_bytes=ledger.total.now_bytes, phase=ledger.span.phase), ledger.clock))
