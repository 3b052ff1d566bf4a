"""The shape of a case: code, and the truth about it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

__all__ = ["ANY", "MARKER", "PRELUDE", "Case", "Expect", "Nothing", "Place", "Problem", "Truth"]

MARKER: Final = "# <- here"
"""Stands on the line that the finding must name."""

PRELUDE: Final = """\
import math, random
import torch, torch.nn as nn, torch.nn.functional as F
torch.set_num_threads(1)
torch.manual_seed(0); random.seed(0)
"""
"""Runs before the setup of every case, as a cell of its own."""


class _Any:
    """Not checked."""

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = _Any()


class _Default:
    """Follows from the other fields."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = _Default()


@dataclass(frozen=True, kw_only=True)
class Expect:
    """The one true finding. A field that is `ANY` is not checked; a frozenset lists the names that are equally true."""

    kind: Any
    phase: Any
    op: Any = ANY
    module: Any = ANY
    call: Any = DEFAULT
    """1, unless said otherwise, where `module` is checked; None outside every module."""
    line: bool | _Any = True
    """Whether the line of the marker is checked; never for data and parameter, which have no line of their own."""
    step: Any = 0
    backward: Any = DEFAULT
    """As `step`, unless said otherwise."""
    rows: Any = ANY
    diagnosis: Any = None
    """None where it is not checked."""
    tensor: Any = ANY
    reproduced: Any = DEFAULT
    """True, unless said otherwise, for forward, loss and backward findings."""
    count: Any = ANY
    """How many findings there are in all."""
    bad_steps: Any = ANY
    """Every step of the finding, the first one included."""

    def fields(self) -> Mapping[str, Any]:
        """What is checked, by name, the line left aside."""
        replayed = self.phases <= {"forward", "loss", "backward"}
        in_module = 1 if isinstance(self.module, (str, frozenset)) and replayed else None if self.module is None else ANY
        wanted = {
            "kind": self.kind,
            "phase": self.phase,
            "op": self.op,
            "module": self.module,
            "call": in_module if self.call is DEFAULT else self.call,
            "step": self.step,
            "backward": self.step if self.backward is DEFAULT else self.backward,
            "rows": self.rows,
            "diagnosis": ANY if self.diagnosis is None else self.diagnosis,
            "tensor": self.tensor,
            "count": self.count,
            "bad_steps": self.bad_steps,
            "reproduced": (True if replayed else ANY) if self.reproduced is DEFAULT else self.reproduced,
        }
        return {name: value for name, value in wanted.items() if value is not ANY}

    @property
    def phases(self) -> frozenset[Any]:
        """Those that are true."""
        return self.phase if isinstance(self.phase, frozenset) else frozenset({self.phase})


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """No finding."""

    raises: str | None = None
    """The name of the user's own exception, which must pass unchanged."""
    overflow_steps: Any = None
    steps: int | None = None
    """Optimizer steps completed, where it is checked."""
    backwards: int | None = None
    problems: bool = False
    """Whether a line in `problems` is in place: there was something that could not be looked at."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Found, the exact place hard to reach: what is said must be true, and the report must say what it could not do.

    A replay that is faithful all the same (`reproduced`, and the marked line) needs no excuse.
    """

    kind: Any
    phase: Any
    op: Any = ANY
    """Checked where the step was reproduced."""
    step: Any = ANY
    line: bool | _Any = ANY
    may_miss: bool = False
    """Whether nothing found will do, if the report says what it could not look at."""


Truth: TypeAlias = Expect | Nothing | Problem


@dataclass(frozen=True)
class Place:
    """Where the marker stands."""

    part: str
    """``"cell"``, ``"setup"`` or a file's name."""
    line: int
    source: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """Code with a truth about it."""

    name: str
    cell: str
    truth: Truth
    setup: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Importable modules that stand beside the notebook."""
    needs: str = ""
    """A package without which the case cannot run."""
    pure: bool = True
    """Whether two plain runs from one seed give the same bits."""

    def __post_init__(self) -> None:
        for name in ("cell", "setup"):
            object.__setattr__(self, name, _code(getattr(self, name)))
        object.__setattr__(self, "files", {name: _code(text) for name, text in self.files.items()})

    @property
    def prelude(self) -> str:
        """The imports and the seed."""
        return PRELUDE

    def place(self) -> Place | None:
        """The line with the marker, counted in its own text; None where there is none."""
        found = [
            Place(part, number, line.strip())
            for part, text in {"cell": self.cell, "setup": self.setup, **self.files}.items()
            for number, line in enumerate(text.splitlines(), 1)
            if MARKER in line
        ]
        if len(found) > 1:
            msg = f"{self.name}: the marker stands {len(found)} times"
            raise ValueError(msg)
        return found[0] if found else None


def _code(text: str) -> str:
    return textwrap.dedent(text).strip("\n") + "\n" if text.strip() else ""
