"""The report of ``%shrink``: which layers were kept, and how much smaller the model is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torchdebug_magics.format import byte_size, capitalised, count, listed, plural
from torchdebug_magics.report import Report

_ROOM = 90
"""Characters of a headline."""
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
    """Number of different kinds of layers, by class, configuration and parameter shapes."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Size and cost of a model."""

    parameters: int
    bytes: int
    """Memory of parameters and buffers."""
    flops: int | None = None
    """FLOPs of one forward; None where they were not counted."""
    seconds_s: float | None = None
    """Time of one forward on real data; None where none was timed."""


@dataclass(frozen=True, kw_only=True)
class ShrinkReport(Report):
    """Which layers were kept, and how much smaller the model is."""

    stacks: tuple[StackRow, ...] = ()
    before: Costs
    after: Costs
    undone: bool = False
    """Whether the model is as it was before; see `reason`."""
    reason: str = ""
    error: str = ""
    """The error of the forward, such as ``IndexError: ...``; empty where it succeeded."""
    location: str = ""
    """The line of the model that raised it."""
    proof: Proof = ""
    """The kind of tensors on which the forward ran, before and after."""
    input: str = ""
    """The input of the forward, such as ``input_ids 1 x 8 int64``."""
    skipped_attention: int = 0
    """Layers whose attention is replaced."""
    device: str = ""
    """The device on which the weights of a model on ``meta`` were created."""
    restored: bool = field(default=False)
    """Whether `--undo` restored all layers."""

    @property
    def kept(self) -> Mapping[str, tuple[int, ...]]:
        """Indices of the kept layers in the large model, by the path of their container."""
        return {} if self.undone else {stack.path: stack.kept for stack in self.stacks}

    @property
    def parameters_before(self) -> int:
        """Parameters of the large model."""
        return self.before.parameters

    @property
    def parameters_after(self) -> int:
        """Parameters of the model as it is now."""
        return self.after.parameters

    @property
    def verdict(self) -> str:
        """How small the model became, or why it was not shrunk."""
        if self.restored:
            names = listed([f"`{stack.path}`" for stack in self.stacks])
            size = f"{count(self.after.parameters)} parameters, {byte_size(self.after.bytes)}"
            return f"Restored: {names} {'has' if len(self.stacks) == 1 else 'have'} the original layers again, {size}"
        if self.undone:
            return f"Not shrunk, the model is unchanged: {self.reason}"
        return capitalised(" · ".join([*self._changes(), f"the forward runs on {self.proof}"]))

    @property
    def title(self) -> str:
        """How small the model became and the layers that were kept, as far as a headline has room."""
        if self.restored:
            return f"Restored the original layers: {count(self.after.parameters)} parameters"
        if self.undone:
            return "Not shrunk: the model is unchanged"
        return capitalised(" · ".join(self._changes()[: self._shown()])) or "The forward runs"

    @property
    def further(self) -> tuple[str, ...]:
        """The changes that the headline has no room for."""
        return tuple(self._changes()[self._shown() :])

    def _shown(self) -> int:
        """How many changes the headline has room for."""
        changes = self._changes()
        return next((many for many in range(len(changes), 1, -1) if len(" · ".join(changes[:many])) <= _ROOM), 1)

    def _changes(self) -> list[str]:
        changes = [f"{count(self.before.parameters)} parameters became {count(self.after.parameters)}"] if self.stacks else []
        changes += [_layers(stack) for stack in self.stacks[:3]]
        changes += [f"{len(self.stacks) - 3} more stacks"] if len(self.stacks) > 3 else []  # noqa: PLR2004 - as many as are read at a glance
        changes += [f"attention skipped in {plural(self.skipped_attention, 'layer')}"] if self.skipped_attention else []
        return changes + ([f"initialized on {self.device}"] if self.device else [])


def _layers(stack: StackRow) -> str:
    first, last = stack.kept[0], stack.kept[-1]
    numbers = [str(number) for number in stack.kept]
    which = f"{', '.join(numbers[:-1])} and {last}" if len(numbers) > 1 else f"{first}"
    if len(numbers) > 3 and last - first == len(numbers) - 1:  # noqa: PLR2004 - as many as are read at a glance
        which = f"{first} to {last}"
    return f"`{stack.path}` keeps {'layers' if len(numbers) > 1 else 'layer'} {which} of {stack.layers_before}"
