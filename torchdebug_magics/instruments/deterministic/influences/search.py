"""The calls in the user's code whose answers make two runs differ: with these held, the runs agree."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from torchdebug_magics.instruments.deterministic.influences.answers import Answers
from torchdebug_magics.instruments.deterministic.influences.influence import ADDRESS, OutsideCall
from torchdebug_magics.instruments.deterministic.ops.digest_recorder import DigestRecorder
from torchdebug_magics.instruments.deterministic.ops.op_recording import Op, Recording, Seen
from torchdebug_magics.instruments.deterministic.twice.body import Enough
from torchdebug_magics.instruments.deterministic.twice.run_comparison import RunComparison
from torchdebug_magics.instruments.deterministic.twice.runs import Runs
from torchdebug_magics.probing.modules import live_modules

_LEAST_TRIES, _MOST_TRIES, _MOST_S = 2, 8, 3.0
"""Of runs that are to agree, as two may by chance; only long ones are made less often."""


def asked_by(runs: Runs, place: int | None, also: Callable[[ExitStack], object] = lambda _: None) -> tuple[OutsideCall, ...]:
    """Those that make what comes before and at the op at `place` differ, in the order in which they ask; none where no answer does.

    Without a place, what the whole run does. Each run begins after `also`.
    """
    search = _Search(runs, sys.maxsize if place is None else place, also)
    every = tuple(search.asked)
    for influence in dict.fromkeys(one.influence for one in every):
        asked = tuple(one for one in every if one.influence is influence)
        if len(asked) < len(every) and search.agrees(frozenset(asked)) and (found := search.needed(asked, frozenset(asked))):
            return found
    if not every or not search.agrees(frozenset(every)):
        return ()
    # Runs one right after the other are often given the same memory: what agrees though no address is held has not agreed with the first.
    return search.needed(every, frozenset(every)) or tuple(one for one in every if one.influence is ADDRESS)


class _Search:
    """Against one run, whose answers are given again."""

    def __init__(self, runs: Runs, place: int, also: Callable[[ExitStack], object]) -> None:
        self._runs, self._place, self._also = runs, place, also
        self._recording = Recording()
        self._modules = list(live_modules())
        answers = Answers(runs.body.namespace)
        with self._answered(answers):
            self._error = runs.again(DigestRecorder(self._recording, self._first, runs.guard, runs.hooks))
        self.asked = answers.given

    def _answered(self, answers: Answers) -> AbstractContextManager[None]:
        def vary(stack: ExitStack) -> None:
            self._also(stack)
            answers.attach(stack)

        return self._runs.otherwise(vary)

    def _first(self, seen: Seen, op: Op) -> None:
        self._recording.add(seen)
        if op.place >= self._place:
            raise Enough

    def agrees(self, held: frozenset[OutsideCall]) -> bool:
        """Whether runs with these answers do what the first one did."""
        begin_s = time.monotonic()
        for count in range(_MOST_TRIES):
            if count >= _LEAST_TRIES and time.monotonic() - begin_s > _MOST_S:
                break
            run = RunComparison(self._recording, self._modules, self._runs.guard, self._runs.hooks, until=self._place)
            with self._answered(Answers(self._runs.body.namespace, self.asked, held)):
                error = self._runs.again(run)
            if error is None and not run.is_over:
                run.end()
            if run.difference is not None or type(error) is not type(self._error):
                return False
        return True

    def needed(self, group: tuple[OutsideCall, ...], held: frozenset[OutsideCall]) -> tuple[OutsideCall, ...]:
        """Those of a group without which runs that hold all others differ."""
        if self.agrees(held.difference(group)):
            return ()
        if len(group) == 1:
            return group
        half = len(group) // 2
        return (*self.needed(group[:half], held), *self.needed(group[half:], held)) or group[:1]
