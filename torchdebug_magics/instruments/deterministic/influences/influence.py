"""What a run asks outside of its code and is answered otherwise each time; and the line of the user's code that asks."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torchdebug_magics.instruments.deterministic.report import Cause, Dependence, On
from torchdebug_magics.probing.source.syntax import called, dotted
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.report import Location

_SEED = 42


@dataclass(frozen=True)
class Influence:
    """One kind of what is asked."""

    cause: Cause
    on: On | None
    what: str
    """A clause, with ``{text}`` for the call."""
    fix: str | Callable[[OutsideCall], str]


class OutsideCall(NamedTuple):
    """A call in the user's code that asks, by itself or deep inside."""

    influence: Influence
    file: str
    line: int
    function: str
    first_parameter: str
    """Of the method that it stands in, after ``self``."""
    text: str
    """As it is written; empty where that is not known."""
    seed: str = ""
    """The parameter of the library's function that takes a seed, if the library asks."""

    @property
    def location(self) -> Location:
        """The line."""
        return location(self.file, self.line, self.function)

    @property
    def call(self) -> ast.expr | None:
        """What is written there."""
        return ast.parse(self.text, mode="eval").body if self.text else None

    @property
    def path(self) -> str:
        """Of what is called, such as ``time.time``; empty where it has no name."""
        return dotted(self.call.func) if isinstance(self.call, ast.Call) else ""

    @property
    def dependence(self) -> Dependence:
        """In words."""
        influence = self.influence
        what = influence.what.format(text=f"`{self.text}`" if self.text else "this line")
        fix = influence.fix.replace("{text}", self.text) if isinstance(influence.fix, str) else influence.fix(self)
        return Dependence(on=influence.on or "entropy", op="", location=self.location, what=what, fix=fix)


def _seeded(otherwise: str) -> Callable[[OutsideCall], str]:
    def fix(asked: OutsideCall) -> str:
        """A seed within a function gives the same numbers at each call."""
        if asked.seed:
            return f"pass `{asked.seed}={_SEED}` to `{asked.path or asked.text}`"
        path = asked.path or otherwise
        if asked.function == "__getitem__" and asked.first_parameter:
            return f"use `{path}({asked.first_parameter})`: different numbers for each item, the same in each run"
        if asked.function == "__init__" or not asked.function.isidentifier():
            return f"use `{path}({_SEED})`"
        return f"create one generator outside `{asked.function}`, `rng = {path}({_SEED})`, and pass it in"

    return fix


def _manual(asked: OutsideCall) -> str:
    return f"use `{asked.path.removesuffix('seed') or 'torch.Generator().'}manual_seed({_SEED})`"


def _zeros(asked: OutsideCall) -> str:
    return f"use `{asked.path.replace('empty', 'zeros') if 'empty' in asked.path else 'np.zeros'}`, or write every element before reading"


def _in_order(asked: OutsideCall) -> str:
    ways = {
        "imap_unordered": "use `imap` instead of `imap_unordered`",
        "as_completed": "iterate over the futures in submission order, or use `map`",
    }
    return f"{ways.get(called(asked.call), 'collect the results in submission order')}, or sort the results"


def _sorted(asked: OutsideCall) -> str:
    match called(asked.call):
        case "":
            return "sort the files"
        case "walk":
            return f"sort both lists from `{asked.text}`: `dirs.sort()`, `files.sort()`"
        case "scandir":
            return f"`sorted({asked.text}, key=lambda entry: entry.name)`"
        case _:
            return f"`sorted({asked.text})`"


_UNSEEDED = "{text} has no seed and takes one from the operating system"
CLOCK = Influence("wall_clock", "clock", "{text} reads the clock", "replace `{text}` with a constant: it reads the clock")
_DRAW = f"replace `{{text}}` with a draw from a seeded generator, such as `random.Random({_SEED})`"
ENTROPY = Influence("os_entropy", "entropy", "{text} reads the operating system's entropy", _DRAW)
NUMPY = Influence("numpy_random", "seed", _UNSEEDED, _seeded("np.random.default_rng"))
PYTHON = Influence("python_random", "seed", _UNSEEDED, _seeded("random.Random"))
TORCH = Influence("unseeded_generator", "seed", "{text} takes a new seed from the operating system", _manual)
ARRIVAL = Influence("outside_data", "order", "{text} returns results in completion order, which varies", _in_order)
LISTING = Influence("outside_data", "order", "{text} returns entries in file-system order, which differs between machines", _sorted)
_HASHED = "{text} gives a number that is computed from memory addresses, which differ in each run"
ADDRESS = Influence("hash_order", "order", _HASHED, "replace `{text}` with a stable key, such as an index")
MEMORY = Influence("uninitialized_memory", "memory", "{text} is uninitialized memory", _zeros)
_READ = "{text} comes from outside the program, and may change"
OUTSIDE = Influence("outside_data", None, _READ, "read it once, in an earlier cell")
PROCESS = Influence("os_entropy", "entropy", "{text} differs in each process", f"replace `{{text}}` with a constant, such as {_SEED}")
