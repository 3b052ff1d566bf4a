"""Performs the ritual while the session is open, and reports what it set and met; reruns and compares where that is asked."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

from torchdebug_magics.errors import DeterminismError, TorchDebugError
from torchdebug_magics.instrument import SCRIPT, CellContext, finished
from torchdebug_magics.instruments.deterministic.counterfactual.dependences import DependenceSearch, of_divergence
from torchdebug_magics.instruments.deterministic.counterfactual.set_order import OrderWatch, on_order
from torchdebug_magics.instruments.deterministic.fingerprint import Fingerprint
from torchdebug_magics.instruments.deterministic.ops.digest_recorder import DigestRecorder, Printer
from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording
from torchdebug_magics.instruments.deterministic.prints.against import agreeing_count, compared, earlier_print
from torchdebug_magics.instruments.deterministic.replicas.replica_watch import ReplicaWatch
from torchdebug_magics.instruments.deterministic.report import DeterministicReport, Divergence, LiveRitual
from torchdebug_magics.instruments.deterministic.ritual.ritual import Ritual
from torchdebug_magics.instruments.deterministic.twice.body import FunctionBody
from torchdebug_magics.instruments.deterministic.twice.culprit import Culprit
from torchdebug_magics.instruments.deterministic.twice.run_comparison import RunComparison, different, plain_results_of, results_of
from torchdebug_magics.instruments.deterministic.twice.runs import FirstRun, Outside, Runs
from torchdebug_magics.probing.distributed import this_rank
from torchdebug_magics.probing.distributed.this_rank import collectives_count
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.outside.effects import Irrevocable
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.session import Session

_TAKEN = "--strict: {} cannot be rewound for a second run: create it in the cell"
_COLLECTIVES = "{} collective calls: a second run on this rank alone would wait for the other ranks"
_NO_CELL = "--verify reruns the code: write `%%deterministic --verify` above a cell, or call `torchdebug_magics.verify(function)`"
NOT_SEEN = "the ops could not be recorded"


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
        self._in_rank = {"seed": self._ritual.seed, "strict": strict, "keep_rng": keep_rng, "ranks": ranks, "in_rank": True}
        self._inquiry = Inquiry(asked, context, self._ritual, self._guard, strict=strict)
        self._live: LiveRitual | None = None
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
        self._inquiry.has_ranks = True
        if self._inquiry.is_asked:
            self._guard.note("--verify, --save and --against cover the process that launches the ranks, not the ranks")
        return dict(self._in_rank)

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
            keep_rng=ritual.keep_rng,
            settings=dict(ritual.settings),
            restored=bool(self._guard.run("looking whether all is put back", lambda: ritual.restored)),
            overruled=ritual.overruled,
            generators=ritual.generators,
            threads_count=ritual.threads_count,
            too_late=ritual.too_late,
            warnings=ritual.alerts.warned,
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
    function: Callable[[], object], *, seed: int = 42, strict: bool = False, keep_rng: bool = False, anyway: bool = False
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


class Inquiry:
    """Records the run where anything is asked; when the run is over, finds the answers: they stand in `found`."""

    def __init__(self, asked: Mapping[str, Any], context: CellContext, ritual: Ritual, guard: Guard, *, strict: bool) -> None:
        self.found = DeterministicReport(seed=ritual.seed)
        self._ritual = ritual
        self._guard = guard
        self._strict, self._body = strict, context.body()
        self._verify, self._quick, self._anyway = (bool(asked.get(name)) for name in ("verify", "quick", "anyway"))
        self._save, self._rtol, self._against = asked.get("save"), asked.get("rtol"), asked.get("against")
        self._earlier: Fingerprint | None = None
        self.has_ranks = False
        """Whether a rank was launched: what is asked is asked of this process alone."""
        self.is_asked = bool(self._verify or self._save or self._against)
        is_printed = bool(self._save or self._against or (context.keeps_output and self._body is not None))
        self._recording = Recording()
        self._hooks = Hooks(guard)
        self._recorder = (Printer if is_printed else DigestRecorder)(self._recording, guard, self._hooks, keeps=self._verify)
        self._runs: Runs | None = None
        self._search: DependenceSearch | None = None

    def attach(self, stack: ExitStack) -> None:
        """Look at what was asked, and record from here; when the stack closes, the answers are sought."""
        self._refuse()
        if self._against is not None:
            self._earlier = earlier_print(self._against, {} if self._body is None else self._body.namespace)
        is_repeated = self._verify and self._body is not None and not self._body.refusal
        if self._verify and self._body is not None:
            self._tell(not_verified=self._body.refusal)
        if isinstance(self._recorder, Printer) or is_repeated:
            stack.push(self._over)
            if is_repeated:
                self._prepare(stack)
            self._recorder.attach(stack)

    def sweep(self) -> None:
        """Finish what an interrupt cut short."""
        self._hooks.sweep()
        if self._runs is not None:
            self._runs.finish()

    def forget(self) -> None:
        """The answers are found: hold nothing of the user's any more."""
        self._body = self._runs = self._search = self._earlier = None
        self._recording = Recording()
        self._recorder = DigestRecorder(self._recording, self._guard, self._hooks)

    def _refuse(self) -> None:
        if self._verify and self._body is None:
            raise TorchDebugError(_NO_CELL)
        msg = ""
        if self._rtol is not None and not 0 <= self._rtol < math.inf:
            msg = f"--rtol must be a number >= 0, such as 1e-5, not {self._rtol:g}"
        elif self._save is not None and not (folder := Path(self._save).expanduser().parent).is_dir():
            msg = f"--save {self._save}: there is no folder {folder}"
        elif self._rtol is not None and self._against is None:
            msg = "--rtol requires --against: two runs of one cell are compared bit by bit"
        if msg:
            raise TorchDebugError(msg)

    def _prepare(self, stack: ExitStack) -> None:
        assert self._body is not None
        outside = Outside(self._body, self._guard, strict=self._strict, anyway=self._anyway)
        runs = Runs(self._body, outside, self._guard, self._hooks)
        if self._strict and (names := runs.leftovers.at_risk()):
            raise DeterminismError(_TAKEN.format(names[0]))
        self._runs, self._search = runs, DependenceSearch(runs, self._ritual, quick=self._quick)
        self._collectives_count = collectives_count()
        outside.first(stack)

    def _over(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if isinstance(self._recorder, Printer):
            self._compare(self._recorder.fingerprint(), error)
        if (runs := self._runs) is None:
            return
        if error is not None:
            self._tell(not_verified=f"the cell raised {type(error).__name__}", ops_count=self._recorder.count)
            runs.finish()
            return
        self._tell(not_verified="the second run did not finish")
        begin_s = time.monotonic()
        try:
            self._guard.run("running the cell again", self._repeat, runs)
        except Irrevocable as act:  # a rerun was about to do what the first run has not done
            self._tell(not_verified=str(act))
        except KeyboardInterrupt:
            self._tell(interrupted=True)  # what was found is shown; Stop stops Run All, too
            raise
        finally:
            self._tell(runs_count=runs.count, runs_s=time.monotonic() - begin_s)
            runs.finish()

    def _repeat(self, runs: Runs) -> None:
        assert self._search is not None
        runs.outside.over()
        begun = collectives_count() - self._collectives_count
        reason = NOT_SEEN if self._recorder.has_failed else runs.outside.refusal or (_COLLECTIVES.format(begun) if begun else "")
        if reason:
            self._tell(not_verified=reason)
            return
        self._search.over()
        runs.first = FirstRun(self._recording, results_of(runs.body, self._recorder.is_unwritten))
        plain = plain_results_of(runs.body)
        runs.over(self._recorder.contents)
        runs.writers = self._recorder.writers
        used_up = runs.leftovers.names()
        orders = OrderWatch(runs.body)
        again = self._second_run(runs, used_up, orders)
        if again is not None and not used_up:  # else a run takes from what no further one finds
            steady = {name: digest for name, digest in plain.items() if again.get(name) == digest}  # what a clock wrote is no result
            runs.first.results.update(steady)
            self._guard.run("searching for what the numbers depend on", self._depend, self._search, orders, runs)
        self._tell(unrestorable=(*used_up, *runs.outside.said))
        if used_up:
            self._tell(carried=used_up)

    def _second_run(self, runs: Runs, used_up: Sequence[str], orders: OrderWatch) -> Mapping[str, int] | None:
        """A digest of each plain value that it leaves; None where the runs do not agree. `orders` watches it, too.

        What is known is told as soon as it is: an interrupt may end the search for the cause.
        """
        comparison = RunComparison(runs, self._recording, to_its_end=bool(used_up), poison=True)
        error = runs.again(comparison, comparison.over, orders.attach)
        runs.second_heard = runs.heard
        if comparison.has_failed and comparison.difference is None:
            self._tell(not_verified=NOT_SEEN, depends_on=())
            return None
        if comparison.difference is not None:
            error = None  # a consequence
        if comparison.difference is None and error is None:
            divergence = different(runs.first.results, comparison.results, runs.body)
            self._conclude(divergence, len(self._recording))
            return comparison.plain_results if divergence is None else None
        culprit = Culprit(comparison, error, runs, used_up, orders.found.values())
        ops_count = len(self._recording) if comparison.difference is None else comparison.difference.place + 1
        for find in (culprit.unexplained, culprit.divergence):
            self._conclude(find(), ops_count)
        return None

    def _tell(self, **fields: Any) -> None:
        self.found = replace(self.found, **fields)

    def _conclude(self, divergence: Divergence | None, ops_count: int) -> None:
        """What the comparison of two runs has found; a difference between them is told first, then one from the earlier run."""
        self._tell(depends_on=of_divergence(divergence), not_verified="")
        if divergence is not None:
            self._tell(against="", rtol=None)
        if divergence is not None or self.found.verified is not False:
            self._tell(verified=divergence is None, divergence=divergence, ops_count=ops_count)

    def _depend(self, search: DependenceSearch, orders: OrderWatch, runs: Runs) -> None:
        try:
            is_steady = search.run(on_order(orders.found.values()))
        finally:
            self._tell(depends_on=search.depends_on, carried=search.carried, unchecked=tuple(search.unchecked))
        if not is_steady:  # two runs had agreed by chance
            runs.first.results.clear()
            self._second_run(runs, (), OrderWatch(runs.body))

    def _compare(self, fingerprint: Fingerprint, error: BaseException | None) -> None:
        self._tell(fingerprint=fingerprint, ops_count=len(fingerprint))
        if self._save and error is not None:
            self._guard.note(f"{self._save} was not written because the cell raised {type(error).__name__}")
        elif self._save:
            text = json.dumps({"fingerprint": fingerprint.to_dict()}) + "\n"
            self._guard.run(f"writing {self._save}", Path(self._save).expanduser().write_text, text, encoding="utf-8")
        if (earlier := self._earlier) is None or self.has_ranks:
            return
        self._tell(against=str(self._against) if isinstance(self._against, (str, Path)) else "the earlier run", rtol=self._rtol)
        if error is not None:
            self._tell(not_verified=f"the cell raised {type(error).__name__}")
            return
        divergence = compared(earlier, fingerprint, rtol=self._rtol)
        agreeing = agreeing_count(earlier, fingerprint) if divergence is None and self._rtol is None else len(fingerprint)
        self._tell(verified=divergence is None, divergence=divergence, ops_count=agreeing)
