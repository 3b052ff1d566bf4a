"""From a run to its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.shapes.explain import explained
from torchdebug_magics.instruments.shapes.parameters import Parameters, named_followed
from torchdebug_magics.instruments.shapes.plan import needs
from torchdebug_magics.instruments.shapes.report import Layout, ShapesReport
from torchdebug_magics.instruments.shapes.uncalled import row_of, uncalled

if TYPE_CHECKING:
    import torch

    from torchdebug_magics.instruments.shapes.examine import Seen
    from torchdebug_magics.instruments.shapes.flops import FlopFormulas
    from torchdebug_magics.instruments.shapes.report import Failure, Row

__all__ = ["params_only", "tabulated"]


def tabulated(seen: Seen, layout: Layout) -> ShapesReport:
    """Everything that was seen, frozen."""
    run = seen.run
    further, unused = uncalled(seen.model, run) if run.error is None else ((), ())
    return ShapesReport(
        problems=tuple(seen.notes),
        model=type(seen.model).__name__,
        inputs=str(seen.run.given),
        rows=run.calls.rows() + further,
        total_params=run.parameters.total,
        trainable_params=run.parameters.trainable,
        buffer_count=run.parameters.buffers,
        total_flops=run.flops,
        uncounted_ops=run.formulas.names(),
        param_bytes=run.parameters.bytes,
        buffer_bytes=run.parameters.buffer_bytes,
        activation_bytes=run.saved_bytes,
        unused=unused,
        mode=seen.mode,
        failure=None if seen.error is None else explained(seen),
        needs=needs(seen.model, run.parameters, run.saved_bytes, run.given) if seen.error is None else (),
        layout=layout,
    )


def of_cell(  # noqa: PLR0913 - the facts of a cell, each from another place
    rows: tuple[Row, ...],
    parameters: Parameters,
    formulas: FlopFormulas,
    *,
    flops: int,
    saved_bytes: int,
    failure: Failure | None,
    layout: Layout,
    problems: tuple[str, ...],
    counts: Mapping[torch.nn.Module, int],
) -> ShapesReport:
    """What the modules of a cell did; `counts` says how often each model was called in all."""
    often = {type(model).__name__: many for model, many in counts.items() if many > 1}
    names = [type(model).__name__ for model in counts]
    return ShapesReport(
        problems=(
            *problems,
            *(f"{name} was called {many:,} times; the first call of each input shape is shown" for name, many in often.items()),
        ),
        model=", ".join(names),
        rows=rows,
        total_params=parameters.total,
        trainable_params=parameters.trainable,
        buffer_count=parameters.buffers,
        total_flops=flops,
        uncounted_ops=formulas.names(),
        param_bytes=parameters.bytes,
        buffer_bytes=parameters.buffer_bytes,
        activation_bytes=saved_bytes,
        mode="real",
        failure=failure,
        layout=layout,
    )


def params_only(model: torch.nn.Module, layout: Layout) -> ShapesReport:
    """The modules as they are nested, with what they hold."""
    parameters = Parameters(model)
    rows = [row_of(path, module, parameters.take(path, module)) for path, module in named_followed(model)]
    return ShapesReport(
        model=type(model).__name__,
        rows=tuple(rows),
        total_params=parameters.total,
        trainable_params=parameters.trainable,
        buffer_count=parameters.buffers,
        total_flops=0,
        param_bytes=parameters.bytes,
        buffer_bytes=parameters.buffer_bytes,
        activation_bytes=0,
        mode="params",
        layout=layout,
    )
