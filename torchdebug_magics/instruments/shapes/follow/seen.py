"""What a run of a model has shown, as the table and the explanation of a failure read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.follow.module_calls import Calls
from torchdebug_magics.instruments.shapes.follow.parameters import Parameters
from torchdebug_magics.instruments.shapes.report import Failure, Mode
from torchdebug_magics.probing.dry_runs.faking import Fakes
from torchdebug_magics.probing.dry_runs.flops import FlopFormulas
from torchdebug_magics.probing.dry_runs.inputs import Inputs
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.report import Location


@dataclass(eq=False)
class Seen:
    """A forward, how it was run, and what has to be said about that."""

    model: torch.nn.Module
    run: Forward
    inputs: Inputs
    mode: Mode
    error: Exception | None
    """In torch's own words for real tensors; None where the forward succeeded."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Forward:
    """What was seen; `error` where it did not succeed."""

    calls: Calls
    parameters: Parameters
    formulas: FlopFormulas
    flops: int
    has_shared_flops: bool
    """Whether some are of ops on tensors that several ranks hold: then they are of all these ranks together."""
    saved_bytes: int
    given: Inputs
    """The tensors that the model was called with."""
    output: Any
    error: Exception | None
    failed: Failed | None
    confirmed: bool
    """Whether the error is one of real tensors, found beside the fakes."""
    unchecked: tuple[str, ...] = ()
    """Ops that refuse some values, and ran on tensors whose values are not known."""
    checked: tuple[str, ...] = ()
    """Ops that refuse some values, and were asked on real tensors."""
    used: frozenset[int] = frozenset()
    """The ids of the model's parameters that some op took."""
    fakes: Fakes | None = None
    """Which know the values of the whole-number tensors."""
    made: Callable[[torch.Tensor], Made | None] = lambda _: None
    """How a tensor of this run came about."""
    reached: int = 0
    """How many functions and modules had been called: how far it came."""
    took_s: float = 0.0
    computed_s: float = 0.0
    """How long this thread held a processor: no more on a machine that is busy with other things."""
    problems: tuple[str, ...] = ()
    """What could not be put back."""
    notes: tuple[str, ...] = ()
    """How the numbers were made."""
    suspect: Failure | None = None
    """What ran without an error and is probably unintended."""


@dataclass(frozen=True, eq=False)
class Made:
    """How a tensor came about: a link of the chain back to the inputs."""

    op: str
    module: str
    number: int
    """The number of the op in this run, by which it can be found again in another run."""
    inputs: tuple[tuple[tuple[int, ...], Made | None], ...] = field(repr=False)
    shape: tuple[int, ...]
    args: tuple[Any, ...] = field(default=(), repr=False)
    """The arguments of the op that are no tensors."""
    line: tuple[CodeType, int, int] | None = field(default=None, repr=False)
    """The user's own, innermost: its code, its number, and the instruction that ran."""
    of_model: bool = False
    """Whether it was made in a module, or of what was."""

    @property
    def location(self) -> Location | None:
        """The user's line."""
        return None if self.line is None else location(self.line[0].co_filename, self.line[1], self.line[0].co_name)


@dataclass(frozen=True, eq=False)
class Failed:
    """The op that raised, with what it was given."""

    func: Any
    op: str
    module: str | None
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[tuple[str, torch.Tensor], ...]
    made: tuple[Made | None, ...]
    """How each operand came about."""
    error: BaseException
    owned: frozenset[int] = frozenset()
    """Which operands are parameters or buffers."""
