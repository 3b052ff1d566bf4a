"""Runs the body a second time, and says whether it gave the same."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchdebug_magics.errors import DeterminismError
from torchdebug_magics.instruments.deterministic.compare import Comparison
from torchdebug_magics.instruments.deterministic.culprit import culprit
from torchdebug_magics.instruments.deterministic.leftovers import Leftovers
from torchdebug_magics.instruments.deterministic.outside import Outside
from torchdebug_magics.instruments.deterministic.potential import Repetitions
from torchdebug_magics.instruments.deterministic.recorder import Recorder
from torchdebug_magics.instruments.deterministic.recording import Recording
from torchdebug_magics.instruments.deterministic.runs import Runs
from torchdebug_magics.probing.modules import live_modules

if TYPE_CHECKING:
    from types import TracebackType

    from torchdebug_magics.instruments.deterministic.body import Body
    from torchdebug_magics.instruments.deterministic.report import Divergence, Potential
    from torchdebug_magics.probing.guard import Guard

__all__ = ["Verification", "Verified"]

_TAKEN = "--strict: the cell names the iterator `{}`, and a second run cannot take from it again: make it in the cell itself"


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What two runs have shown."""

    verified: bool | None = None
    not_verified: str = ""
    """Why there is no answer."""
    divergence: Divergence | None = None
    ops_count: int | None = None
    potential: tuple[Potential, ...] = ()
    unrestorable: tuple[str, ...] = ()


class Verification:
    """Records the first run, and makes the second one when that is over."""

    def __init__(self, body: Body, guard: Guard, *, strict: bool = False) -> None:
        self._body = body
        self._guard = guard
        self._strict = strict
        self._outside = Outside(body.namespace, strict=strict)
        self._leftovers = Leftovers(body.variables)
        self._recording = Recording()
        self._runs: Runs | None = None
        self._recorder = Recorder(self._recording, lambda seen, _op: self._recording.add(seen))
        self.result = Verified(not_verified="the cell did not end")

    def attach(self, stack: ExitStack) -> None:
        """Record from here; when the stack closes, the second run begins."""
        if self._body.refusal:
            self.result = Verified(not_verified=self._body.refusal)
            return
        if self._strict and (names := self._leftovers.at_risk()):
            raise DeterminismError(_TAKEN.format(names[0]))
        self._runs = Runs(self._body, self._outside, self._guard)
        stack.push(self._over)
        self._outside.first(stack)
        self._recorder.attach(stack)

    def sweep(self) -> None:
        """Finish what an interrupt cut short."""
        if self._runs is not None:
            self._runs.finish()

    def _over(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if self._runs is None:
            return
        if error is not None:
            self.result = Verified(not_verified=f"the cell raised {type(error).__name__}", ops_count=len(self._recording))
            return
        self.result = Verified(not_verified="the second run was interrupted", ops_count=len(self._recording))
        try:
            self._runs.over(self._recorder.contents)
            unrestorable = (*(f"the iterator `{name}`" for name in self._leftovers.names()), *self._outside.said)
            self.result = replace(self.result, unrestorable=unrestorable)
            self.result = self._second(self._runs)
        finally:
            self._runs.finish()

    def _second(self, runs: Runs) -> Verified:
        comparison = Comparison(self._recording, live_modules(), poison=True)
        repetitions = Repetitions(comparison.here)
        comparison.recorder.ahead = repetitions.before
        error = runs.again(comparison)
        if error is None:
            comparison.end()
        found = None
        if comparison.difference is not None or error is not None:
            found = culprit(comparison, error, runs)
        return replace(
            self.result,
            not_verified="",
            verified=found is None,
            divergence=found,
            ops_count=len(self._recording) if found is None else comparison.recorder.count,
            potential=repetitions.found(),
        )
