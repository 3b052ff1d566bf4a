"""Backwards from an op, through what its line read, to the lines at which the values that reached it began to differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from typing import NamedTuple, TypeAlias

from torchdebug_magics.instruments.deterministic.origin.line_steps import Call, Files, Place, Run, Step
from torchdebug_magics.instruments.deterministic.origin.pairing import Fork, Pairing, adds_to, binds, callers, differing, writes, wrote

_Question: TypeAlias = "tuple[Step, Place | None, tuple[str, ...]]"
"""What made the value at a place differ before a line, or, without a place, what made the line's own results differ; and its name."""


@dataclass(frozen=True)
class Beginning:
    """A line whose inputs agree, as far as can be seen, and whose results differ."""

    step: Step
    names: tuple[str, ...] = ()
    fork: Fork | None = None
    """Where the runs had gone different ways, and a value was bound on one of them."""
    is_old: bool = False
    """The value differs from the start: it is from before the run, and was not put back."""


class Slicer:
    """Of the first run, compared with the second."""

    def __init__(self, first: Run, second: Run, pairing: Pairing, files: Files) -> None:
        self._pairing = pairing
        self._files = files
        self.history = History(first, second, pairing)
        self._steps = first.steps
        self._of_first = frozenset(first.steps)
        self._done: set[tuple[Step, Place | None]] = set()

    # --- the search ----------------------------------------------------------------------------------------------------------------

    def before(self, step: Step, names: tuple[str, ...] = (), drawn: object = None) -> list[Beginning]:
        """Where began what makes this line give different values; the line itself, if nothing that it reads does.

        What a line draws from need not be named in it.
        """
        found: list[Beginning] = []
        self._done.clear()
        todo: list[_Question] = [(step, self.history.place_of(drawn, step), names)]
        while todo:
            at, place, told = todo.pop()
            if (at, place) in self._done:
                continue
            self._done.add((at, place))
            if place is not None:
                todo += self._maker(at, place, told, found)
            else:
                todo += self._inputs(at, told, found)
        return found

    def _inputs(self, step: Step, names: tuple[str, ...], found: list[Beginning]) -> list[_Question]:
        """What the line read, and what the functions that it called gave back."""
        fork = self._pairing.fork_of.get(step)
        partner = self._pairing.partner.get(step)
        if fork is not None or partner is None:
            found.append(Beginning(step, names, fork=fork))
            return []
        lines = step.whole()
        further = self._read(step)
        called = [one for line in lines for one in line.calls if self._gave_another(one)]
        further += [(last, None, names) for one in called if (last := one.last()) is not None]
        for one in self._pairing.forks:
            if one.is_call and one.after in lines and not further:
                found.append(Beginning(step, names, fork=one))
                return []
        further = further or self._by_other_means(step, lines, names)
        if not further:
            found.append(Beginning(step, names))
        return further

    def _by_other_means(self, step: Step, lines: list[Step], names: tuple[str, ...]) -> list[_Question]:
        """What a line was given that none of its names holds: inside objects, as an exception, through a file, by a thread."""
        start = lines[0]
        inside: list[_Question] = [
            (step, place, (path,)) for path, place in self._inside(start, self._pairing.partner.get(start, self._pairing.partner[step]))
        ]
        if inside:
            return inside
        if step.statement is not None and step.statement.is_handler and start.place:
            return [(start.activation.steps[start.place - 1], None, names)]
        writer = self._files.writer(lines, self._of_first)
        if writer is not None and (writer.sources or self._read(writer) or any(map(self._gave_another, writer.calls))):
            return [(writer, None, names)]
        return [] if any(line.sources for line in lines) else [(last, None, names) for last in self._in_threads(step)]

    def _gave_another(self, call: Call) -> bool:
        other = self._pairing.calls.get(call)
        return other is None or other.returned != call.returned

    def _read(self, step: Step) -> list[_Question]:
        """Names that a line reads, and that hold something else than in the other run."""
        start, statement = step.whole()[0], step.statement
        theirs = self._pairing.partner.get(start)
        if theirs is None or statement is None:
            return []
        return [
            (start, self.history.common(held.place), (path,))
            for path, held in start.before.items()
            if statement.reads(path) and path in theirs.before and theirs.before[path].digest != held.digest
        ]

    def _in_threads(self, step: Step) -> Iterator[Step]:
        """Where functions that threads ran before the end of the line gave back something else: it may have been handed over."""
        after = next(iter(step.activation.steps[step.place + 1 :]), None)
        for call, other in self._pairing.calls.items():
            is_of_another = call.caller is None and call.activation.thread not in {0, step.activation.thread}
            last = call.last() if is_of_another and call.returned != other.returned else None
            if last is not None and (after is None or last.number < after.number):
                yield last

    def _inside(self, step: Step, partner: Step) -> Iterator[tuple[str, Place]]:
        for path, places in step.inside.items():
            others = partner.inside.get(path, {})
            for place, digest in places.items():
                if place[0] == "attribute" and place in others and others[place] != digest:
                    yield path, place

    def _maker(self, at: Step, place: Place, names: tuple[str, ...], found: list[Beginning]) -> list[_Question]:
        """The line before `at` that made the value at `place` differ."""
        latest = at
        for number, step, path in reversed(self.history.of(place)):
            if number >= at.number or step is at:
                continue
            partner = self._pairing.partner.get(step)
            if partner is None:
                if writes(step, path):
                    found.append(Beginning(step, (path,), fork=self._pairing.fork_of.get(step)))
                    return []
                continue
            was, became = differing(step, partner, path)
            if became and (binds(step, path) or not was):
                return self._within(step, partner, path)
            theirs = self._pairing.partner[latest].before.get(names[0]) if names and latest in self._pairing.partner else None
            if not became and place[0] == "attribute" and (theirs is None or theirs.place != place):
                break  # it is another object than in the other run
            if not became and (around := self._around(step, latest, path)) is not None:
                return self._within(around, self._pairing.partner[around], path)
            if not became:
                return self._out_of_sight(step, latest, path, names, found)
            latest = step
        return self._from_caller(latest, place, names, found)

    def _around(self, step: Step, later: Step, path: str) -> Step | None:
        """The line that had called this one, and at whose end it differs: such a line ends after those that it calls."""
        open_lines = {id(one) for one in callers(later)}
        return next(
            (
                one
                for one in callers(step)
                if id(one) not in open_lines and one in self._pairing.partner and differing(one, self._pairing.partner[one], path)[1]
            ),
            None,
        )

    def _out_of_sight(self, agreed: Step, differs: Step, path: str, names: tuple[str, ...], found: list[Beginning]) -> list[_Question]:
        """Between two lines something changed it under another name, or on a way that only one run took."""
        value = differs.before.get(names[0]) if names else None
        wanted = {value.digest, *differs.inside.get(names[0], {}).values()} if value is not None else set()
        shared: Step | None = None
        for step in self._steps[agreed.number + 1 : differs.number]:
            partner = self._pairing.partner.get(step)
            if partner is None:
                continue
            for name, held in step.after.items():
                if held.digest in wanted and writes(step, name) and differing(step, partner, name)[1]:
                    return [(step, None, (path,))]
                if (not binds(step, name) or adds_to(step, name)) and differing(step, partner, name) == (False, True):
                    shared = step  # it may be the same memory, as that of an array under a tensor
        for fork in self._pairing.forks:
            if fork.after is not None and agreed.number <= fork.after.number < differs.number:
                found.append(Beginning(fork.after, names, fork=fork))
                return []
        if shared is not None:
            return [(shared, None, (path,))]
        found.append(Beginning(differs, names))
        return []

    def _within(self, step: Step, partner: Step, path: str) -> list[_Question]:
        """The line itself, or one in a function that it called which wrote this very value."""
        after, other = step.after.get(path), partner.after.get(path)
        inner = wrote(step, (after.digest, other.digest), self._pairing.partner) if after is not None and other is not None else None
        return [(inner or step, None, (path,))]

    def _from_caller(self, at: Step, place: Place, names: tuple[str, ...], found: list[Beginning]) -> list[_Question]:
        """What a function was called with; else it is from before the run, or came about out of sight."""
        caller = at.call.caller
        if caller is not None and (place[0] == "local" or (place[0] == "random" and self._is_given(at, place))):
            return [(caller, None, names)]
        if caller is not None and place[0] == "attribute" and names and self._is_another(at, place, names[0]):
            return self._given(caller, names, found)
        if place[0] == "attribute" and names and (maker := self.history.binder(at, names[0].partition(".")[0])) is not None:
            # No line of the user's wrote it: what bound the object made it, or it is another object than in the other run.
            held, theirs = at.before.get(names[0]), self._pairing.partner[at].before.get(names[0])
            inner = wrote(maker, (held.digest, theirs.digest), self._pairing.partner) if held is not None and theirs is not None else None
            return [(inner or maker, None, names)]
        if place[0] == "attribute" and names and (handed := self.history.handed(at, names[0].partition(".")[0])) is not None:
            return [(handed, None, names)]
        found.append(Beginning(at, names, is_old=names != ("os.environ",)))  # which is put back: others have changed it
        return []

    def _is_another(self, at: Step, place: Place, path: str) -> bool:
        """Whether it is an attribute of an argument that is another object in the other run."""
        theirs = self._pairing.partner[at].before.get(path)
        code = at.activation.code
        is_argument = path.partition(".")[0] in code.co_varnames[: code.co_argcount]
        return is_argument and theirs is not None and theirs.place != place

    def _given(self, caller: Step, names: tuple[str, ...], found: list[Beginning]) -> list[_Question]:
        """What the line that called a function read; the line itself, if that agrees: the order in which it was gone through does not."""
        further = self._read(caller)
        if not further:
            found.append(Beginning(caller, names))
        return further

    def _is_given(self, at: Step, place: Place) -> bool:
        """Whether a function was called with it."""
        code = at.activation.code
        return any(held.place == place and path in code.co_varnames[: code.co_argcount] for path, held in at.before.items())


class Seen(NamedTuple):
    """A look at a place."""

    number: int
    step: Step
    path: str
    """What the line calls it."""


class History:
    """Of the first run; lines that only the second run took stand where the runs parted."""

    def __init__(self, first: Run, second: Run, pairing: Pairing) -> None:
        self._pairing = pairing
        self._steps = first.steps
        self._seen: defaultdict[Place, list[Seen]] = defaultdict(list)
        for step in first.steps:
            self._index(step)
        for step in second.steps:
            if step not in pairing.partner:
                self._index(step)
        for entries in self._seen.values():
            entries.sort(key=lambda entry: entry.number)

    def of(self, place: Place) -> Sequence[Seen]:
        """All looks at it."""
        return self._seen.get(place, ())

    def common(self, place: Place) -> Place:
        """What a place of the second run is called in the first one."""
        if place[0] == "local":
            return ("local", self._pairing.activations.get(place[1], place[1]), *place[2:])
        return place

    def place_of(self, drawn: object, before: Step) -> Place | None:
        """Of a generator: in another run it may be another object, then it is the one whose state differs, if there is but one."""
        if drawn is None:
            return None
        place: Place = ("random", id(drawn))
        if place in self._seen:
            return place
        others = [one for one, entries in self._seen.items() if one[0] == "random" and self._ends_otherwise(entries, before)]
        return others[0] if len(others) == 1 else None

    def is_bound(self, name: str) -> bool:
        """Whether a line of the run binds it; else it is from before."""
        return any(step.statement is not None and name in step.statement.bound for step in self._steps)

    def handed(self, at: Step, name: str) -> Step | None:
        """The last line before that handed an object to a function, with something that is different each time, as `setattr` takes it."""
        for step in reversed(self._steps[: at.number]):
            calls = step.statement.calls if step.statement is not None and step.sources else ()
            if any(name in {one.partition(".")[0] for one in call.arguments} for call in calls):
                return step
        return None

    def binder(self, at: Step, name: str) -> Step | None:
        """The line before that bound a name, in the same function or in another statement of the cell."""
        code = at.activation.code
        for step in reversed(self._steps[: at.number]):
            own = step.activation is at.activation or (not code.co_flags & CO_OPTIMIZED and step.activation.code.co_name == code.co_name)
            if own and step.statement is not None and name in step.statement.bound:
                return step
        return None

    def _ends_otherwise(self, entries: list[Seen], before: Step) -> bool:
        for number, step, path in reversed(entries):
            partner = self._pairing.partner.get(step)
            if number < before.number and partner is not None:
                return differing(step, partner, path)[1]
        return False

    def _index(self, step: Step) -> None:
        fork = self._pairing.fork_of.get(step)
        number = step.number if fork is None or fork.after is None else fork.after.number
        for path in {*step.before, *step.after}:
            held = step.after.get(path) or step.before[path]
            self._seen[self.common(held.place)].append(Seen(number, step, path))
