"""One sentence for each cause: what differs, and what made it so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.deterministic.origin.sources import OF_THREADS
from torchdebug_magics.instruments.deterministic.origin.steps import has_address

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.recording import Step
    from torchdebug_magics.instruments.deterministic.report import Cause

__all__ = ["sentence"]

_WHY = {
    "wall_clock": "is made from {source}, and the time is another one in each run",
    "os_entropy": "is made from {source}, which asks the operating system for random bytes",
    "python_random": "is made from {source} without a seed, which takes one from the operating system",
    "numpy_random": "is made from {source} without a seed, which takes one from the operating system",
    "unseeded_generator": "is made from {source}, which takes a new seed from the operating system",
    "uninitialized_memory": "is memory that {source} has made and nobody has written as a whole",
    "outside_data": "comes from {source}, which is outside of the program and may change",
}


def sentence(cause: Cause, step: Step, names: tuple[str, ...], sources: tuple[str, ...], *, is_old: bool, file: str) -> str:  # noqa: C901, PLR0911 - a table of causes
    """For a line whose values differ."""
    what = ", ".join(f"`{name}`" for name in names) or "A value on this line"
    asked = ", ".join(f"`{source}()`" for source in sources)
    facts = step.statement.facts if step.statement is not None else {}
    iterated = [path for path in (step.statement.iterated if step.statement is not None else ()) if path in facts]
    match cause:
        case "outside_data" if sources and OF_THREADS.issuperset(sources):
            return f"{what} comes from {asked}, which gives what other threads or processes have ready first, in another order in each run"
        case "outside_data" if step.activation.thread and not sources:
            return f"{what} is written by a thread, and threads do not take turns in the same order in each run"
        case "hash_order" if sources:
            return f"{what} is made from {asked}, which for an object is its address in memory"
        case "hash_order" if has_address(step):
            return f"{what} is made from an object as a text, in which its address in memory stands"
        case "hash_order":
            return f"{what} comes from {_named(iterated, 'a set')}, which is ordered by hashes, and those of objects are their addresses"
        case "worker_seed":
            return f"{what} comes from the workers of {_named(iterated, 'a DataLoader')}, which draw from generators that nobody seeded"
        case "state_leak" if file:
            return f"{what} is read from `{Path(file).name}`, which the first run had written to"
        case "state_leak" if is_old:
            return f"{what} is from before the cell, the first run changed it, and it could not be put back"
        case "state_leak":
            return f"{what} is taken from {_named(iterated, 'an iterator')}, and the first run had already taken from it"
        case "outside_data" if not asked:
            return f"{what} comes from a file or from the environment, outside of the program"
        case _ if cause in _WHY:
            return f"{what} {_WHY[cause].format(source=asked or 'something')}"
        case _:
            return f"{what} differs between two runs from here on; nothing known for that was called on this line"


def _named(paths: list[str], otherwise: str) -> str:
    return f"`{paths[0]}`" if paths else otherwise
