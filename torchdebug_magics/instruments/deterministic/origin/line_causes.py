"""The cause by name of a line at which two runs began to differ, a sentence on it, and the repair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torchdebug_magics.instruments.deterministic.origin.line_statements import Called
from torchdebug_magics.instruments.deterministic.origin.line_steps import Files, Source, Step
from torchdebug_magics.instruments.deterministic.origin.nondeterminism_sources import OF_THREADS, OF_TORCH
from torchdebug_magics.instruments.deterministic.origin.pairing import ON, Origin, Pairing, differing, has_address
from torchdebug_magics.instruments.deterministic.report import Cause
from torchdebug_magics.probing.where import location
from torchdebug_magics.report import Location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.backward_slice import Beginning, Slicer


_INDEPENDENT = frozenset({"os_entropy", "wall_clock", "numpy_random", "python_random"})
"""Each differs by itself: one that is repaired leaves the others."""
_SHARPEST = (
    "worker_seed",
    "numpy_random",
    "unseeded_generator",
    "python_random",
    "os_entropy",
    "uninitialized_memory",
    "wall_clock",
    "hash_order",
    "state_leak",
    "outside_data",
)
"""Where a line asked several: a generator that seeds itself asks the system, too, and a file is read by `next`."""
_WHY = {
    "wall_clock": "is computed from {source}, which reads the clock",
    "os_entropy": "is computed from {source}, which reads the operating system's entropy",
    "python_random": "is drawn from {source} without a seed, which takes one from the operating system",
    "numpy_random": "is drawn from {source} without a seed, which takes one from the operating system",
    "unseeded_generator": "is drawn from {source}, which takes a new seed from the operating system",
    "uninitialized_memory": "is uninitialized memory from {source}",
    "outside_data": "comes from {source}, outside the program, and may change",
}
_SEED = 42
_IN_ORDER = {
    "imap_unordered": "use `imap` instead of `imap_unordered`",
    "as_completed": "iterate over the futures in submission order, or use `map`",
}


class Judge:
    """Of two runs."""

    def __init__(self, pairing: Pairing, files: Files, slicer: Slicer) -> None:
        self._pairing = pairing
        self._files = files
        self._slicer = slicer

    def origin(self, beginning: Beginning) -> Origin:
        """What to tell of it."""
        if beginning.fork is not None:
            return self._of_fork(beginning)
        sources = self._sources(beginning.step)
        cause = self._cause(beginning, sources)
        others = dict.fromkeys(one.cause for one in sources if one.cause in _INDEPENDENT and cause in _INDEPENDENT and one.cause != cause)
        further = tuple(self._of_cause(beginning, sources, cast("Cause", other)) for other in others)
        return replace(self._of_cause(beginning, sources, cause), further=further)

    def _of_cause(self, beginning: Beginning, sources: list[Source], cause: Cause) -> Origin:
        step = beginning.step
        of_cause = [one for one in sources if one.cause == cause] or (sources if cause in {"worker_seed", "state_leak"} else [])
        line = next((one.line for one in of_cause if _holds(step, one.line)), step.line)
        names = self._names(beginning)
        told = tuple(dict.fromkeys(one.name for one in of_cause))
        return Origin(
            cause=cause,
            location=_location(step, line),
            names=names,
            sources=told,
            on="order" if told and OF_THREADS.issuperset(told) else "race" if step.activation.thread else ON.get(cause),
            explanation=sentence(cause, step, names, told, is_old=beginning.is_old, file=self._wrote(step)),
            fix=repair(cause, step, names, told),
        )

    def _of_fork(self, beginning: Beginning) -> Origin:
        fork = beginning.fork
        assert fork is not None
        after = fork.after
        behind = self._slicer.before(after) if after is not None and not fork.is_call else []
        origins = [self.origin(one) for one in behind if one.fork is None]
        told = next((one for one in origins if one.cause != "unknown"), None)
        one, other = fork.one or fork.other or beginning.step, fork.other
        is_cache = fork.is_call and after is not None and after.statement is not None and "cache" in after.statement.facts.values()
        at = after if after is not None and (is_cache or fork.is_call) else one
        is_turn = told is None and at.activation.thread != 0  # whose it is: threads do not go different ways by themselves
        cause: Cause = "state_leak" if is_cache else "outside_data" if is_turn else "control_flow"
        names = beginning.names or self._names(beginning)
        branch = None if after is None else _location(after, after.line)
        return Origin(
            cause=cause,
            location=_location(at, at.line),
            branch=None if after is None else branch_after(after),
            branch_head=branch,
            other=None if other is None or other is at else _location(other, other.line),
            decided=None if told is None else told.location,
            on="race" if at.activation.thread else None if told is None else told.on or ON.get(told.cause),
            names=names,
            sources=told.sources if told else (),
            explanation=sentence(cause, at, names, (), is_old=False, file="")
            if is_turn
            else _on_branch(branch, told, is_cache=is_cache, names=names),
            fix=told.fix if told else repair(cause, at, names, ()),
        )

    def _sources(self, step: Step) -> list[Source]:
        """The user's own asking first: what a library asks for is mostly for itself. Who hands over what comes first may be in order."""
        asked = [source for line in step.whole() for source in line.sources]
        found = [one for one in asked if one.name not in OF_THREADS] or asked
        nearest = min((one.distance for one in found), default=0)
        return [one for one in found if one.distance == nearest]

    def _cause(self, beginning: Beginning, sources: list[Source]) -> Cause:
        step = beginning.step
        facts = step.statement.facts if step.statement is not None else {}
        iterated = {facts.get(path, "") for path in step.statement.iterated} if step.statement is not None else set()
        if "workers" in iterated:
            return "worker_seed"
        if beginning.is_old or self._wrote(step):
            return "state_leak"
        if step.activation.thread and all(one.cause == "outside_data" for one in sources):
            return "outside_data"  # whose turn it is
        for cause in _SHARPEST:
            if any(one.cause == cause for one in sources):
                named = cast("Cause", cause)
                return (self._of_iteration(step, iterated) or named) if named == "state_leak" else named
        return self._of_iteration(step, iterated) or "unknown"

    def _of_iteration(self, step: Step, iterated: set[str]) -> Cause | None:
        is_of_set = "set" in iterated or (step.statement is not None and "{}" in step.statement.iterated)
        if is_of_set or _calls_for_address(step):
            return "hash_order"
        if "file" in iterated:
            assert step.statement is not None
            files = [path for path in step.statement.iterated if step.statement.facts.get(path) == "file"]
            return "outside_data" if all(map(self._slicer.history.is_bound, files)) else "state_leak"
        if "iterator" in iterated:
            return "state_leak"
        if step.statement is not None and any(path.startswith(("os.environ", "sys.argv")) for path in step.statement.paths):
            return "outside_data"
        return "hash_order" if has_address(step) else None

    def _wrote(self, step: Step) -> str:
        name = self._files.read_by(step.statement)
        return name if name in self._files.written else ""

    def _names(self, beginning: Beginning) -> tuple[str, ...]:
        """What differs after the line and did not before, as far as it was bound there; else what was asked for."""
        step = beginning.step
        partner = self._pairing.partner.get(step)
        if partner is None:
            return beginning.names
        new = tuple(path for path in step.after if path in partner.after and differing(step, partner, path) == (False, True))
        bound = step.statement.bound if step.statement is not None else frozenset()
        again = tuple(path for path in step.after if path in bound and path in partner.after and differing(step, partner, path)[1])
        found = tuple(dict.fromkeys((*new, *again)))
        return tuple(path for path in found if path != OF_TORCH) or found or beginning.names


def branch_after(step: Step) -> tuple[str, int, int] | None:
    """The file, and the first and the last line, of the statement that a line begins."""
    statement = step.statement
    return None if statement is None else (step.activation.code.co_filename, statement.first, statement.end)


def _calls_for_address(step: Step) -> bool:
    return step.statement is not None and any(path in {"id", "hash"} and path not in step.before for path in step.statement.paths)


def _holds(step: Step, line: int) -> bool:
    return step.statement is not None and step.statement.first <= line <= step.statement.last


def _location(step: Step, line: int) -> Location:
    code = step.activation.code
    return location(code.co_filename, line, code.co_name)


def _on_branch(branch: Location | None, told: Origin | None, *, is_cache: bool, names: tuple[str, ...]) -> str:
    what = f"{quoted(names)} differs because " if names else ""
    if is_cache:
        where = "" if branch is None else f" at line {branch.line}"
        return f"{what}the function called{where} is cached: the first run filled the cache, so the second did not run it"
    if branch is None:
        return f"{what}the two runs started with different lines"
    if told is None:
        return f"{what}the two runs took different branches after line {branch.line}"
    by = quoted(told.sources) or quoted(told.names)
    where = "" if told.location.line == branch.line else f" at line {told.location.line}"
    return f"{what}the branch taken after line {branch.line} depends on {by or 'what changed'}{where}"


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


def repair(cause: Cause, step: Step, names: tuple[str, ...], sources: tuple[str, ...]) -> str:  # noqa: C901, PLR0911 - a table of causes
    """In a few words; empty where nothing is known."""
    calls = step.statement.calls if step.statement is not None else ()
    called = next((one for one in calls if any(one.path.endswith(source.rpartition(".")[2]) for source in sources)), None)
    match cause:
        case "numpy_random" | "python_random":
            made = _seeded(called, "np.random.default_rng" if cause == "numpy_random" else sources[0])
            return _in_function(made, step)
        case "unseeded_generator":
            return _manual(calls)
        case "wall_clock":
            return f"replace `{called.text if called else f'{sources[0]}()'}` with a constant: it reads the clock"
        case "os_entropy":
            asked = called.text if called else f"{sources[0]}()"
            return f"replace `{asked}` with a draw from a seeded generator, such as `random.Random({_SEED})`"
        case "hash_order":
            return _ordered(step, called)
        case "worker_seed":
            given = f"generator=torch.Generator().manual_seed({_SEED})"
            return f"pass `{given}` to the DataLoader, and seed the dataset's own generators in its `worker_init_fn`"
        case "state_leak":
            return f"create {quoted(names) or 'the object'} in this cell"
        case "uninitialized_memory":
            zeros = called.path.replace("empty", "zeros") if called is not None and "empty" in called.path else "np.zeros"
            return f"use `{zeros}`, or write every element before reading"
        case "outside_data" if _is_of_threads(step, sources):
            ordered = (text for name, text in _IN_ORDER.items() if any(source.endswith(name) for source in sources))
            return f"{next(ordered, 'collect the results in submission order')}, or sort the results"
        case "outside_data":
            return "read it once, in an earlier cell"
        case _:
            return ""


def _is_of_threads(step: Step, sources: tuple[str, ...]) -> bool:
    return OF_THREADS.issuperset(sources) if sources else step.activation.thread != 0


def _seeded(called: Called | None, otherwise: str) -> str:
    return f"`{called.path if called and called.path else otherwise}({_SEED})`"


def _in_function(made: str, step: Step) -> str:
    """A seed within a function gives the same numbers at each call."""
    code = step.activation.code
    if code.co_name in {"<module>", "__init__"}:
        return f"use {made}"
    if code.co_name == "__getitem__" and code.co_argcount > 1:
        return f"use {made.replace(f'({_SEED})', f'({code.co_varnames[1]})')}: different numbers for each item, the same in each run"
    return f"create one generator outside `{step.activation.code.co_name}`, `rng = {made.strip('`')}`, and pass it in"


def _manual(calls: tuple[Called, ...]) -> str:
    for one in calls:
        if one.text.endswith("torch.seed()"):
            return f"use `torch.manual_seed({_SEED})`"
        if one.text.endswith(".seed()"):
            return f"use `{one.text.removesuffix('seed()')}manual_seed({_SEED})`"
    return f"use `torch.Generator().manual_seed({_SEED})`"


def _ordered(step: Step, called: Called | None) -> str:
    if called is not None:
        return f"replace `{called.text}` with a stable key, such as an index"
    if has_address(step):
        return "use a stable key, such as a name or an index, instead of the object's `repr`"
    statement = step.statement
    sets = [path for path in statement.iterated if statement.facts.get(path) == "set"] if statement is not None else []
    return (
        f"iterate over `sorted({sets[0]}, key=...)`, or use a list or a dict instead of the set"
        if sets
        else "replace the set with a list or a dict"
    )


def quoted(names: tuple[str, ...]) -> str:
    """As code, one after the other; empty where there is none."""
    return ", ".join(f"`{name}`" for name in names)
