"""One sentence for each cause: what differs, and what made it so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.deterministic.origin.lines.nondeterminism_sources import OF_THREADS
from torchdebug_magics.instruments.deterministic.origin.step_questions import has_address

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.lines.line_steps import Step
    from torchdebug_magics.instruments.deterministic.report import Cause

__all__ = ["sentence"]

_WHY = {
    "wall_clock": "is computed from {source}, which reads the clock",
    "os_entropy": "is computed from {source}, which reads the operating system's entropy",
    "python_random": "is drawn from {source} without a seed, which takes one from the operating system",
    "numpy_random": "is drawn from {source} without a seed, which takes one from the operating system",
    "unseeded_generator": "is drawn from {source}, which takes a new seed from the operating system",
    "uninitialized_memory": "is uninitialized memory from {source}",
    "outside_data": "comes from {source}, outside the program, and may change",
}


def sentence(cause: Cause, step: Step, names: tuple[str, ...], sources: tuple[str, ...], *, is_old: bool, file: str) -> str:  # noqa: C901, PLR0911 - a table of causes
    """For a line whose values differ."""
    what = ", ".join(f"`{name}`" for name in names) or "A value on this line"
    asked = ", ".join(f"`{source}()`" for source in sources)
    facts = step.statement.facts if step.statement is not None else {}
    iterated = [path for path in (step.statement.iterated if step.statement is not None else ()) if path in facts]
    match cause:
        case "outside_data" if sources and OF_THREADS.issuperset(sources):
            return f"{what} comes from {asked}: results arrive in completion order, which varies"
        case "outside_data" if step.activation.thread and not sources:
            return f"{what} is written by a thread, and the order of threads varies"
        case "hash_order" if sources:
            return f"{what} is computed from {asked}, which for an object is its memory address"
        case "hash_order" if has_address(step):
            return f"{what} is computed from the text of an object, which contains its memory address"
        case "hash_order":
            named = f"`{iterated[0]}`, a set" if iterated else "a set"
            return f"{what} comes from {named}: set order depends on hashes, for objects on their addresses"
        case "worker_seed":
            return f"{what} comes from the workers of {_named(iterated, 'a DataLoader')}, which draw from unseeded generators"
        case "state_leak" if file:
            return f"{what} is read from `{Path(file).name}`, which the first run wrote"
        case "state_leak" if is_old:
            return f"{what} is from before the cell: the first run changed it, and it could not be restored"
        case "state_leak":
            return f"{what} is taken from {_named(iterated, 'an iterator')}, which the first run had already advanced"
        case "outside_data" if not asked:
            return f"{what} comes from a file or the environment, outside the program"
        case _ if cause in _WHY:
            return f"{what} {_WHY[cause].format(source=asked or 'a call')}"
        case _:
            return f"{what} differs between two runs from here on; no known nondeterministic call on this line"


def _named(paths: list[str], otherwise: str) -> str:
    return f"`{paths[0]}`" if paths else otherwise
