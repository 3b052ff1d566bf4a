"""What to change in the very code of a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.instruments.deterministic.origin.lines.nondeterminism_sources import OF_THREADS
from torchdebug_magics.instruments.deterministic.origin.step_questions import has_address

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.lines.line_statements import Called
    from torchdebug_magics.instruments.deterministic.origin.lines.line_steps import Step
    from torchdebug_magics.instruments.deterministic.report import Cause

__all__ = ["quoted", "repair"]

_SEED = 42
_IN_ORDER = {
    "imap_unordered": "use `imap` instead of `imap_unordered`",
    "as_completed": "iterate over the futures in submission order, or use `map`",
}


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
