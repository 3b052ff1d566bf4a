"""Questions about one line that ran: who called it, what it bound and wrote, and whether that is another in the other run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.lines.line_steps import Call, Step

__all__ = ["adds_to", "binds", "callers", "differing", "has_address", "writes", "wrote"]


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
