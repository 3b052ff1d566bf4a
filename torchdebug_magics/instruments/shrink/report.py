"""What became of a model that was shrunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torchdebug_magics.format import byte_size, capitalised, count, listed, plural
from torchdebug_magics.report import Report

__all__ = ["Costs", "ShrinkReport", "StackRow"]

Proof = Literal["meta tensors", "fake tensors", "real tensors", ""]


@dataclass(frozen=True, kw_only=True)
class StackRow:
    """One stack of repeated layers."""

    path: str
    type: str
    """The class of its layers."""
    layers_before: int
    kept: tuple[int, ...]
    kinds: int
    """How many different layers there are: by class, configuration, parameter shapes."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a model takes."""

    parameters: int
    bytes: int
    """Of parameters and buffers."""
    flops: int | None = None
    """Of the forward that proves it; None where none ran."""
    seconds_s: float | None = None
    """Of a forward that computed; None where none did."""


@dataclass(frozen=True, kw_only=True)
class ShrinkReport(Report):
    """Which layers are left, and what that saves."""

    stacks: tuple[StackRow, ...] = ()
    before: Costs
    after: Costs
    undone: bool = False
    """Whether the model is as it was before; see `reason`."""
    reason: str = ""
    error: str = ""
    """What the forward raised, as ``IndexError: ...``; empty where it came through."""
    location: str = ""
    """The line of the model that raised it."""
    proof: Proof = ""
    """On what the forward before and after ran."""
    input: str = ""
    """The tensors that it ran on, such as ``input_ids 1 x 8 int64``."""
    skipped_attention: int = 0
    """Layers whose attention is replaced."""
    device: str = ""
    """Where the weights of a model on ``meta`` were made."""
    restored: bool = field(default=False)
    """Whether this was ``--undo``."""

    @property
    def kept(self) -> Mapping[str, tuple[int, ...]]:
        """The kept layers, as numbers in the large model, by the path of their container."""
        return {} if self.undone else {stack.path: stack.kept for stack in self.stacks}

    @property
    def parameters_before(self) -> int:
        """Of the large model."""
        return self.before.parameters

    @property
    def parameters_after(self) -> int:
        """Of the model as it is now."""
        return self.after.parameters

    @property
    def verdict(self) -> str:
        """How small it is, or why it stays large."""
        if self.restored:
            names = listed([f"`{stack.path}`" for stack in self.stacks])
            return f"Restored: {names} {'has' if len(self.stacks) == 1 else 'have'} the original layers again, {_size(self.after)}"
        if self.undone:
            return f"Not shrunk, the model is as before: {self.reason}"
        said = [f"{count(self.before.parameters)} parameters became {count(self.after.parameters)}"] if self.stacks else []
        said += [_layers(stack) for stack in self.stacks[:3]]
        said += [f"{len(self.stacks) - 3} more stacks"] if len(self.stacks) > 3 else []  # noqa: PLR2004 - as many as are read at a glance
        said += [f"attention skipped in {plural(self.skipped_attention, 'layer')}"] if self.skipped_attention else []
        said += [f"initialized on {self.device}"] if self.device else []
        return capitalised(" · ".join([*said, f"the forward runs on {self.proof}"]))


def _size(costs: Costs) -> str:
    return f"{count(costs.parameters)} parameters, {byte_size(costs.bytes)}"


def _layers(stack: StackRow) -> str:
    first, last = stack.kept[0], stack.kept[-1]
    numbers = [str(number) for number in stack.kept]
    which = f"{', '.join(numbers[:-1])} and {last}" if len(numbers) > 1 else f"{first}"
    if len(numbers) > 3 and last - first == len(numbers) - 1:  # noqa: PLR2004 - as many as are read at a glance
        which = f"{first} to {last}"
    return f"`{stack.path}` keeps {'layers' if len(numbers) > 1 else 'layer'} {which} of {stack.layers_before}"
