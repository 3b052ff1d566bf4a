"""``%%shapes``: the modules that a cell calls, followed while they run for real."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.instruments.shapes.calls import Calls
from torchdebug_magics.instruments.shapes.parameters import Parameters
from torchdebug_magics.instruments.shapes.report import Layout, ShapesReport

if TYPE_CHECKING:
    from contextlib import ExitStack

__all__ = ["ShapesProbe"]


class ShapesProbe:
    """See `shapes`."""

    def __init__(self, *, depth: int | None = None, columns: str = "", sort: str = "", plot: bool = False, **_: object) -> None:
        self._layout = Layout(depth=depth, columns=tuple(filter(None, columns.replace(",", " ").split())), sort=sort, plot=plot)
        self._calls = Calls(None, Parameters())

    def attach(self, stack: ExitStack) -> None:
        """Follow every module call."""
        self._calls.attach(stack)

    def sweep(self) -> None:
        """Remove what an interrupt left."""
        self._calls.sweep()

    def report(self) -> ShapesReport:
        """The rows so far."""
        return ShapesReport(
            model="",
            rows=self._calls.rows(),
            total_params=0,
            trainable_params=0,
            buffer_count=0,
            total_flops=0,
            param_bytes=0,
            activation_bytes=0,
            mode="real",
            layout=self._layout,
        )

    def live(self) -> None:
        """There is no live view."""

    def kept(self) -> dict[str, object]:
        """Nothing is kept."""
        return {}
