"""A session runs one probe and guarantees its clean-up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from torchdebug_magics.errors import SessionError, TorchDebugError
from torchdebug_magics.report import Report

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


ReportT = TypeVar("ReportT", bound=Report)
ReportT_co = TypeVar("ReportT_co", bound=Report, covariant=True)
_OWN = str(Path(__file__).parent)
_WAY_TO_AN_OP = ("torch/_ops.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py")
"""Files between a dispatch mode and the op; without a mode, the op is called from C++."""


class Probe(Protocol[ReportT_co]):
    """Attaches to torch and collects a report."""

    def attach(self, stack: ExitStack) -> None:
        """Start collecting; every undo action is registered on `stack`."""

    def sweep(self) -> None:
        """Remove what an interrupted attach or detach may have left; idempotent."""

    def report(self) -> ReportT_co:
        """Return the frozen report; called once, after everything is detached."""

    def live(self) -> object | None:
        """A snapshot for the live view while the session is open, or None; may be called from any thread."""

    def kept(self) -> dict[str, object]:
        """Live objects kept for inspection, by name; they may pin memory."""

    # It may have `traceback_of(error)`, see `Session`, and `standing()`: why its cell makes no progress, in one line, empty while it does.
    # Where that returns no None, the kernel's position is recorded, so that the next kernel reports it if this one is killed.


class Session(Generic[ReportT]):
    """Runs one probe, once. It may be exited twice: a second exit finishes one that was interrupted."""

    def __init__(self, probe: Probe[ReportT], check: Callable[[ReportT, BaseException | None], ReportT] = lambda report, _: report) -> None:
        """`check` looks through the report before it is handed out, given the error that ended the session."""
        self._probe = probe
        self._check = check
        self._stack: ExitStack | None = None
        self._entered = False
        self._report: ReportT | None = None

    def __enter__(self) -> Self:
        if self._entered:
            msg = "a session runs once: make a new one"
            raise SessionError(msg)
        self._entered = True
        try:
            with ExitStack() as attaching:
                self._probe.attach(attaching)
                self._stack = attaching.pop_all()
        except BaseException:
            self._probe.sweep()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._stack is not None:
                self._stack.__exit__(kind, error, trace)
        finally:
            if self._entered:
                self._probe.sweep()
            if self._stack is not None and self._report is None:
                report = self._check(self._probe.report(), error)
                self._report = report if kind is None else replace(report, cut_short=kind.__name__)
            if error is not None:
                without_ours(error)

    def sweep(self) -> None:
        """Remove what was left, as a process that was forked in the session must; no report comes of it."""
        self._probe.sweep()

    @property
    def report(self) -> ReportT:
        """The report; raises `SessionError` before the session has ended."""
        if self._report is None:
            msg = "the report is ready when the session has ended: read it after the `with` block"
            raise SessionError(msg)
        return self._report

    @property
    def has_ended(self) -> bool:
        """Whether the report is there."""
        return self._report is not None

    def live(self) -> object | None:
        """The probe's snapshot while the session is open, or None."""
        return self._probe.live() if self._stack is not None and self._report is None else None

    def traceback_of(self, error: BaseException) -> list[str]:
        """The lines shown in place of an error's traceback; empty for the plain traceback."""
        ask = getattr(self._probe, "traceback_of", None)
        return [] if ask is None else ask(error)

    @property
    def is_recorded(self) -> bool:
        """Whether the kernel's position is recorded while the session is open."""
        return getattr(self._probe, "standing", lambda: None)() is not None

    def standing(self) -> str:
        """Why the cell makes no progress; empty if it does, or if the probe cannot tell."""
        return getattr(self._probe, "standing", lambda: None)() or ""

    @property
    def kept(self) -> dict[str, object]:
        """Live objects kept by the probe for inspection, by name."""
        return self._probe.kept()

    @property
    def bad(self) -> object:
        """The tensors at a finding (inputs and output, detached), by name; empty if nothing was found."""
        return self.kept.get("bad", {})


def without_ours(error: BaseException) -> None:
    """Unlink this package's frames in place; a `TorchDebugError` keeps all frames."""
    trace = None if isinstance(error, TorchDebugError) else error.__traceback__
    while trace is not None:
        trace.tb_next = past_ours(trace.tb_next)
        trace = trace.tb_next


def first_interrupt(error: BaseException) -> BaseException:
    """The interrupt that landed in the user's code, where clean-up has raised another one on top; else the error itself."""
    while isinstance(error, KeyboardInterrupt) and isinstance(error.__context__, KeyboardInterrupt):
        error = error.__context__
    return error


def past_ours(trace: TracebackType | None) -> TracebackType | None:
    """The first entry that is not this package's; frames that torch adds around ours are skipped with them."""
    at, last_own = trace, None
    while at is not None and (_is_own(at) or at.tb_frame.f_code.co_filename.replace("\\", "/").endswith(_WAY_TO_AN_OP)):
        if _is_own(at):
            last_own = at
        at = at.tb_next
    return trace if last_own is None else at


def _is_own(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_OWN)
