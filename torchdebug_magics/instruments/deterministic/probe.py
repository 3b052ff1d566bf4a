"""Performs the ritual while the session is open, and reports what it set and met."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

from torchdebug_magics.instrument import SCRIPT, CellContext, finished
from torchdebug_magics.instruments.deterministic.inquiry import Inquiry
from torchdebug_magics.instruments.deterministic.replicas.replica_watch import ReplicaWatch
from torchdebug_magics.instruments.deterministic.report import DeterministicReport, LiveRitual
from torchdebug_magics.instruments.deterministic.ritual.ritual import Ritual
from torchdebug_magics.instruments.deterministic.twice.body import FunctionBody
from torchdebug_magics.probing import this_rank
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.session import Session


class Options(TypedDict, total=False):
    """What is wanted besides the ritual."""

    verify: bool
    quick: bool
    against: object
    save: str | Path | None
    rtol: float | None
    anyway: bool
    """Whether a rerun may do again what cannot be put back."""
    in_rank: bool
    """Whether this is a process that the session of another has launched."""


class DeterministicProbe:
    """One cell's, or that of all cells until ``%deterministic off``. Wrong options are a `TorchDebugError`."""

    def __init__(
        self,
        context: CellContext = SCRIPT,
        *,
        seed: int = 42,
        strict: bool = False,
        keep_rng: bool = False,
        ranks: bool = False,
        **asked: Unpack[Options],
    ) -> None:
        self._guard = Guard()
        self._ritual = Ritual(seed, strict=strict, keep_rng=keep_rng, guard=self._guard)
        self._strict, self._keep_rng = strict, keep_rng
        self._inquiry = Inquiry(asked, context, self._ritual, self._guard, strict=strict)
        self._live: LiveRitual | None = None
        self._ranks = ranks
        is_rank = asked.get("in_rank") or this_rank.world_size() > 1
        self._replicas = ReplicaWatch(self._guard, every=ranks) if is_rank else None

    def attach(self, stack: ExitStack) -> None:
        """Seed and set everything."""
        self._ritual.attach(stack)
        self._live = LiveRitual(self._ritual.seed, len(self._ritual.settings), self._ritual.generators)
        stack.callback(setattr, self, "_live", None)
        if self._replicas is not None:
            self._replicas.attach(stack, self._ritual.seedables)
        self._inquiry.attach(stack)

    def options_in_rank(self) -> dict[str, object]:
        """With which a rank runs that the cell launches: what runs the cell again is left out."""
        self._inquiry.launches_ranks()
        return {"seed": self._ritual.seed, "strict": self._strict, "keep_rng": self._keep_rng, "ranks": self._ranks, "in_rank": True}

    def sweep(self) -> None:
        """Undo what an interrupt has left."""
        if self._replicas is not None:
            self._replicas.sweep()
        self._inquiry.sweep()
        self._ritual.undo()

    def live(self) -> LiveRitual | None:
        """What holds while the session is open."""
        return self._live

    def kept(self) -> dict[str, object]:
        """Nothing, nor is anything held: when it is over, see `Inquiry.forget`."""
        return {}

    def report(self) -> DeterministicReport:
        """What was set, met and put back."""
        ritual = self._ritual
        report = replace(
            self._inquiry.found,
            keep_rng=self._keep_rng,
            settings=dict(ritual.settings),
            restored=bool(self._guard.run("looking whether all is put back", lambda: ritual.restored)),
            overruled=ritual.overruled,
            generators=ritual.generators,
            threads_count=ritual.threads_count,
            too_late=ritual.too_late,
            warnings=ritual.warnings,
            replica=self._guard.run("the record of the replicas", self._replicas.record) if self._replicas is not None else None,
            problems=tuple(self._guard.problems),
        )
        self._inquiry.forget()
        return report


watch = DeterministicProbe


@dataclass(frozen=True, kw_only=True)
class _FunctionContext(CellContext):
    function_body: FunctionBody

    def body(self) -> FunctionBody:
        return self.function_body


def verify(
    function: Callable[[], object],
    *,
    seed: int = 42,
    strict: bool = False,
    keep_rng: bool = False,
    anyway: bool = False,
) -> DeterministicReport:
    """Call `function`, without arguments, twice from the same start; what it raises is raised. Afterwards all is as after one call.

    If it does what cannot be undone, such as a request, it is called once and `report.not_verified` says so; `anyway` calls it again.
    """
    if not callable(function):
        msg = f"verify() takes a function and calls it: `verify(step)`, not `verify(step())`; got a {type(function).__name__}"
        raise TypeError(msg)
    body = FunctionBody(function)
    context = _FunctionContext(function_body=body)
    session = Session(DeterministicProbe(context, seed=seed, strict=strict, keep_rng=keep_rng, verify=True, anyway=anyway), finished)
    with session:
        body.run()
    return session.report
