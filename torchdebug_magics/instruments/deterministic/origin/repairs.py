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
    "imap_unordered": ": `imap` in place of `imap_unordered`",
    "as_completed": ": iterate over the futures themselves, or use `map`",
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
            return f"replace `{called.text if called else 'the time'}` with a constant: it reads the clock"
        case "os_entropy":
            asked = called.text if called else f"{sources[0]}()"
            return f"replace `{asked}` with a draw from a seeded generator, such as `random.Random({_SEED})`"
        case "hash_order":
            return _ordered(step, called)
        case "worker_seed":
            given = f"generator=torch.Generator().manual_seed({_SEED})"
            return f"pass `{given}` to the DataLoader, and seed in its `worker_init_fn` whatever the dataset draws from"
        case "state_leak":
            return f"create {quoted(names) or 'it'} in this cell"
        case "uninitialized_memory":
            return f"`{called.path.replace('empty', 'zeros') if called else 'np.zeros'}`, or write every element before reading"
        case "outside_data" if _is_of_threads(step, sources):
            instead = next((text for name, text in _IN_ORDER.items() if any(source.endswith(name) for source in sources)), "")
            return f"take the results in submission order{instead}, or sort them"
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
        return made
    if code.co_name == "__getitem__" and code.co_argcount > 1:
        return f"{made.replace(f'({_SEED})', f'({code.co_varnames[1]})')}: other numbers for each item, the same in each run"
    return f"make one generator outside of `{step.activation.code.co_name}`, `rng = {made.strip('`')}`, and pass it in"


def _manual(calls: tuple[Called, ...]) -> str:
    for one in calls:
        if one.text.endswith("torch.seed()"):
            return f"`torch.manual_seed({_SEED})`"
        if one.text.endswith(".seed()"):
            return f"`{one.text.removesuffix('seed()')}manual_seed({_SEED})`"
    return f"`torch.Generator().manual_seed({_SEED})`"


def _ordered(step: Step, called: Called | None) -> str:
    if called is not None:
        return f"replace `{called.text}` with a number of your own"
    if has_address(step):
        return "use a name or a number of your own instead of the object's `repr`"
    statement = step.statement
    sets = [path for path in statement.iterated if statement.facts.get(path) == "set"] if statement is not None else []
    return (
        f"give it an order: `sorted({sets[0]}, key=...)`, or keep a list or a dict instead"
        if sets
        else "replace the set with a list or a dict"
    )


def quoted(names: tuple[str, ...]) -> str:
    """As code, one after the other; empty where there is none."""
    return ", ".join(f"`{name}`" for name in names)
