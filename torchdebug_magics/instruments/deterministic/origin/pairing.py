"""Which line of one run is which of the other; and where the two runs went different ways."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.lines.line_statements import Statement
    from torchdebug_magics.instruments.deterministic.origin.lines.line_steps import Activation, Call, Run, Step

__all__ = ["Fork", "Pairing"]


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
