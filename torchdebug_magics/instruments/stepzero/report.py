"""What was kept at step zero, and what has moved since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchdebug_magics.format import byte_size, capitalised, count, listed, plural, share
from torchdebug_magics.report import Report

FROZEN = "frozen"
"""The reason that is no surprise."""
Action = Literal["kept", "compared", "restored", "dropped"]


@dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """How far one parameter has moved."""

    parameter: str
    distance: float
    """The norm of its change."""
    relative: float | None
    """The distance divided by the norm at step zero; None where that norm was 0."""
    learning_rates: float | None
    """Root mean square change of an element, in learning rates; None without an optimizer, or where the rate is 0."""
    why: str = ""
    """Why the parameter did not move, or how it moved though it was frozen."""


@dataclass(frozen=True, kw_only=True)
class BufferRow:
    """How far one buffer has moved."""

    buffer: str
    distance: float


@dataclass(frozen=True, kw_only=True)
class DataRow:
    """Whether data changed since step zero."""

    data: str
    digest: str
    """Digest of the present data; empty where the data is gone."""
    changed: bool | None
    """None where there is nothing to compare."""


@dataclass(frozen=True, kw_only=True)
class StepzeroReport(Report):
    """What was kept at step zero, and what has moved since."""

    action: Action
    steps: int | None = None
    """Optimizer steps since; None where the optimizer does not count them."""
    moved: tuple[ParameterRow, ...] = ()
    """Sorted by `relative`, the largest first."""
    unmoved: tuple[ParameterRow, ...] = ()
    buffers: tuple[BufferRow, ...] = ()
    """Buffers that changed."""
    data: tuple[DataRow, ...] = ()
    parameters_count: int = 0
    elements_count: int = 0
    local_elements_count: int | None = None
    """Of these, those in this process: fewer where ranks share a model; None where that was not looked at."""
    held_bytes: int = 0
    """Memory of step zero that is not shared with the model."""
    shared_bytes: int = 0
    """Memory that step zero shares with the model, until the model is written to."""
    file: str = ""

    @property
    def moved_though_frozen(self) -> tuple[ParameterRow, ...]:
        """Parameters that moved although they were frozen."""
        return tuple(row for row in self.moved if row.why)

    @property
    def unexpected(self) -> tuple[ParameterRow, ...]:
        """Trainable parameters that never moved."""
        return tuple(row for row in self.unmoved if row.why and row.why != FROZEN) if self.moved or self.steps else ()

    @property
    def verdict(self) -> str:
        """What was kept, or what has moved and why the rest has not."""
        where = f" in {self.file}" if self.file else ""
        if self.action == "restored":
            return self.title.replace(":", f"{where}:", 1)
        if self.action == "kept":
            sizes = f"{plural(self.parameters_count, 'parameter')} ({self.elements(' elements')})"
            return f"Step zero is kept{where}: {sizes}, buffers, optimizer and random state" + ("" if self.file else f" · {self.memory}")
        if self.action == "dropped":
            return self.title
        texts = [f"`{row.parameter}` moved though it was frozen: {row.why}" for row in self.moved_though_frozen[:1]]
        most = next((row for row in self.moved if row.relative is not None), None)
        far = f", `{most.parameter}` most ({share(most.relative or 0)} of its norm)" if most is not None else ""
        texts.append(f"{self._how_many()}{far}")
        if self.moved or self.steps:
            texts += [f"{names} never moved: {why}" for why, names in self._never_moved()]
        texts += [f"{self._changed} changed"] if self._changed else []
        return capitalised(" · ".join(texts))

    @property
    def title(self) -> str:
        """What was kept, or how many parameters have moved; the reasons have rows of their own."""
        if self.action == "dropped":
            return "Step zero is dropped"
        if self.action != "compared":
            done = "Restored to step zero" if self.action == "restored" else "Step zero is kept"
            return f"{done}: {plural(self.parameters_count, 'parameter')}, buffers, optimizer and random state"
        return capitalised(self._how_many(len(self.moved_though_frozen)))

    def elements(self, noun: str = "") -> str:
        """How many numbers the parameters have, and how many of them are in this process."""
        is_part = self.local_elements_count not in {None, self.elements_count}
        here = f", {count(self.local_elements_count or 0)} of them in this process" if is_part else ""
        return f"{count(self.elements_count)}{noun}{here}"

    @property
    def memory(self) -> str:
        """Memory that step zero takes, and the part of it that is shared with the model."""
        shared = f", {byte_size(self.shared_bytes)} shared with the model" if self.shared_bytes else ""
        return f"holds {byte_size(self.held_bytes)}{shared}"

    @property
    def causes(self) -> tuple[tuple[str, str], ...]:
        """The findings with their reasons, as ``(name, text)``: what moved though it was frozen, what never moved, which data changed."""
        rows = [("moved", f"`{row.parameter}`: {row.why}") for row in self.moved_though_frozen[:3]]
        rows += [("never moved", f"{names}: {why}") for why, names in self._never_moved()]
        return tuple(rows + ([("data changed", self._changed)] if self._changed else []))

    def _how_many(self, frozen: int = 0) -> str:
        after = "" if self.steps is None else f"after {plural(self.steps, 'step')} "
        if frozen:
            return f"{after}{plural(frozen, 'frozen parameter')} moved"
        if not self.moved:
            return f"{after}no parameter has moved since step zero"
        return f"{after}{len(self.moved):,} of {plural(self.parameters_count, 'parameter')} moved"

    def _never_moved(self) -> list[tuple[str, str]]:
        """(the reason, the parameters that never moved for it); frozen ones only where nothing else is to be explained."""
        by_reason: dict[str, list[str]] = {}
        for row in self.unexpected or self.unmoved:
            by_reason.setdefault(row.why, []).append(f"`{row.parameter}`")
        return [(why, listed(names)) for why, names in by_reason.items() if why]

    @property
    def _changed(self) -> str:
        return listed([f"`{row.data}`" for row in self.data if row.changed])
