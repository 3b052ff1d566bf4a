"""Which line of one run is which of the other; and where the two runs went different ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

from torchdebug_magics.instruments.deterministic.origin.line_statements import Statement
from torchdebug_magics.instruments.deterministic.origin.line_steps import Activation, Call, Run, Step
from torchdebug_magics.instruments.deterministic.report import Cause, On
from torchdebug_magics.report import Location

ON: Final[Mapping[str, On]] = {
    "unseeded_generator": "seed",
    "python_random": "seed",
    "numpy_random": "seed",
    "worker_seed": "seed",
    "wall_clock": "clock",
    "os_entropy": "entropy",
    "hash_order": "order",
    "uninitialized_memory": "memory",
    "nondeterministic_op": "race",
    "state_leak": "carried_state",
}
"""By cause."""


@dataclass(eq=False)
class Fork:
    """Two ways, taken after the same line."""

    after: Step | None
    """The last line in common, of the first run; None where the body itself begins differently."""
    one: Step | None
    """The first line that only the first run took; None where it took none."""
    other: Step | None
    is_call: bool = False
    """A function was called in one of the runs only, or another one was."""


@dataclass(eq=False)
class Pairing:
    """Of two runs."""

    partner: dict[Step, Step] = field(default_factory=dict)
    """Of the first run's lines, and of the second's."""
    calls: dict[Call, Call] = field(default_factory=dict)
    """Of the first run's calls."""
    activations: dict[Activation, Activation] = field(default_factory=dict)
    """Of the second run's activations."""
    fork_of: dict[Step, Fork] = field(default_factory=dict)
    """Of lines that one run alone took."""
    forks: list[Fork] = field(default_factory=list)
    _todo: list[tuple[Activation, Activation]] = field(default_factory=list)

    @classmethod
    def of(cls, first: Run, second: Run) -> Pairing:
        """Pair all lines, from the outermost calls inwards."""
        found = cls()
        for thread in sorted({call.activation.thread for call in (*first.roots, *second.roots)}):
            one, other = ([call for call in run.roots if call.activation.thread == thread] for run in (first, second))
            found._pair_calls(None, one, other)
        while found._todo:
            found._pair_lines(*found._todo.pop())
        return found

    def _pair_calls(self, caller: Step | None, first: list[Call], second: list[Call]) -> None:
        place = 0
        for place, (one, other) in enumerate(zip_longest(first, second)):  # noqa: B007 - where it stopped is used below
            if one is None or other is None or one.activation.key != other.activation.key:
                break
            self.calls[one] = other
            if other.activation not in self.activations:
                self.activations[other.activation] = one.activation
                self._todo.append((one.activation, other.activation))
        else:
            return
        self._fork(Fork(caller, _first(first[place:]), _first(second[place:]), is_call=True), first[place:], second[place:], [])

    def _pair_lines(self, first: Activation, second: Activation) -> None:
        ones, others = first.steps, second.steps
        here = there = 0
        while here < len(ones) and there < len(others):
            one, other = ones[here], others[there]
            if one.line == other.line:
                self.partner[one], self.partner[other] = other, one
                self._pair_calls(one, one.calls, other.calls)
                here, there = here + 1, there + 1
                continue
            after = ones[here - 1] if here else None
            next_here, next_there = _together_again(ones, here, others, there, after.statement if after is not None else None)
            self._fork(Fork(after, one, other), [], [], ones[here:next_here] + others[there:next_there])
            here, there = next_here, next_there
        if here < len(ones) or there < len(others):
            rest = Fork(ones[here - 1] if here else None, next(iter(ones[here:]), None), next(iter(others[there:]), None))
            self._fork(rest, [], [], ones[here:] + others[there:])

    def _fork(self, fork: Fork, first: list[Call], second: list[Call], steps: list[Step]) -> None:
        self.forks.append(fork)
        todo = [*steps, *(step for call in (*first, *second) for step in call.steps())]
        while todo:
            step = todo.pop()
            if step not in self.fork_of:
                self.fork_of[step] = fork
                todo += [inner for call in step.calls for inner in call.steps()]


def _together_again(ones: list[Step], here: int, others: list[Step], there: int, statement: Statement | None) -> tuple[int, int]:
    """After the innermost statement around the fork that both runs left for the same line."""
    while statement is not None:
        next_here, next_there = _left(ones, here, statement), _left(others, there, statement)
        if next_here < len(ones) and next_there < len(others) and ones[next_here].line == others[next_there].line:
            return next_here, next_there
        statement = statement.parent
    return len(ones), len(others)


def _left(steps: list[Step], start: int, statement: Statement) -> int:
    while start < len(steps) and statement.first <= steps[start].line <= statement.end:
        start += 1
    return start


def _first(calls: list[Call]) -> Step | None:
    return next((step for call in calls for step in call.steps()), None)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The first line on the way to an op at which two runs differ."""

    cause: Cause
    location: Location
    other: Location | None = None
    """Where the other run stood, if it went another way."""
    decided: Location | None = None
    """The line that made the runs go different ways, where its cause is known."""
    branch: tuple[str, int, int] | None = None
    """The file, and the first and the last line, of the statement after which the runs went different ways."""
    branch_head: Location | None = None
    """The first line of that statement."""
    names: tuple[str, ...] = ()
    """What differs after the line, as the user writes it, such as ``"noise"`` or ``"self.scale"``."""
    sources: tuple[str, ...] = ()
    """What the line asked for numbers that are different each time, such as ``"time.perf_counter"``."""
    on: On | None = None
    """What the numbers depend on; of runs that went different ways, what decides the way does."""
    explanation: str
    """One sentence."""
    fix: str = ""
    """What to change; empty where nothing can be said."""
    further: tuple[Origin, ...] = ()
    """Other lines on the way to the same op, or other causes on this line, which remain when this one is repaired."""


def callers(step: Step) -> Iterator[Step]:
    """The lines whose calls a line ran in, the innermost first."""
    caller = step.call.caller
    while caller is not None:
        yield caller
        caller = caller.call.caller


def differing(step: Step, partner: Step, path: str) -> tuple[bool, bool]:
    """Whether what a name held differs between the runs before a line, and after it."""
    found = []
    for mine, theirs in ((step.before, partner.before), (step.after, partner.after)):
        one, other = mine.get(path), theirs.get(path)
        found.append((one.digest if one else None) != (other.digest if other else None))
    return found[0], found[1]


def binds(step: Step, path: str) -> bool:
    """Whether the line binds a name, whatever it held before."""
    return step.statement is not None and path in step.statement.bound


def adds_to(step: Step, path: str) -> bool:
    """Whether the line may change what the name holds, in place, though it binds the name, too."""
    return step.statement is not None and path in step.statement.added_to


def writes(step: Step, path: str) -> bool:
    """Whether a name holds something else after the line, or is bound anew."""
    before, after = step.before.get(path), step.after.get(path)
    return binds(step, path) or (after is not None and (before is None or before.digest != after.digest))


def has_address(step: Step) -> bool:
    """Whether the line makes a text of an object, in which its address in memory may stand."""
    statement = step.statement
    return statement is not None and ("repr" in statement.paths or any(statement.facts.get(path) == "address" for path in statement.bound))


def wrote(caller: Step, digests: tuple[int, int], partner: Mapping[Step, Step]) -> Step | None:
    """The last line that a line's calls ran, in which a name got the first digest, and in the other run the second."""
    for step in _below(caller.calls):
        theirs = partner[step].after if step in partner else {}
        for name, held in step.after.items():
            if name in theirs and (held.digest, theirs[name].digest) == digests and writes(step, name):
                return step
    return None


def _below(calls: Iterable[Call]) -> Iterator[Step]:
    """From the last line to the first."""
    todo = list(calls)
    while todo:
        for step in reversed(todo.pop().steps()):
            yield step
            todo += step.calls
