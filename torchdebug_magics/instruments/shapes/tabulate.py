"""From a run to its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.shapes.explain import explained
from torchdebug_magics.instruments.shapes.parameters import Parameters
from torchdebug_magics.instruments.shapes.plan import needs
from torchdebug_magics.instruments.shapes.report import Layout, Row, ShapesReport

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.examine import Seen
    from torchdebug_magics.instruments.shapes.flops import FlopFormulas
    from torchdebug_magics.instruments.shapes.report import Failure

__all__ = ["params_only", "tabulated"]


def tabulated(seen: Seen, layout: Layout) -> ShapesReport:
    """Everything that was seen, frozen."""
    run = seen.run
    rows = run.calls.rows()
    return ShapesReport(
        problems=tuple(seen.notes),
        model=type(seen.model).__name__,
        inputs=str(seen.run.given),
        rows=rows,
        total_params=run.parameters.total,
        trainable_params=run.parameters.trainable,
        buffer_count=run.parameters.buffers,
        total_flops=run.flops,
        uncounted_ops=run.formulas.names(),
        param_bytes=run.parameters.bytes,
        buffer_bytes=run.parameters.buffer_bytes,
        activation_bytes=run.saved_bytes,
        unused=() if run.error is not None else _unused(seen.model, {row.path for row in rows}),
        mode=seen.mode,
        failure=None if seen.error is None else explained(seen),
        needs=needs(seen.model, run.parameters, run.saved_bytes, run.given) if seen.error is None else (),
        layout=layout,
    )


def of_cell(
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
    rows = []
    for path, module in model.named_modules():
        owned = parameters.take(path, module)
        rows.append(
            Row(
                path=path,
                type=type(module).__name__,
                call=0,
                depth=path.count(".") + 1 if path else 0,
                own_params=owned.params,
                trainable_params=owned.trainable,
                note=owned.note,
            )
        )
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


def _unused(model: torch.nn.Module, called: set[str]) -> tuple[str, ...]:
    """Modules that hold parameters and were never called, the outermost of each branch."""
    found: list[str] = []
    seen = {id(model.get_submodule(path)) for path in called if path}
    for path, module in model.named_modules():
        holds = any(True for _ in module.parameters())
        inside = any(path.startswith(f"{outer}.") for outer in found)
        ran = id(module) in seen or any(id(part) in seen for part in module.modules())
        if path and holds and not ran and not inside and not _is_read(module):
            found.append(path)
    return tuple(found)


def _is_read(module: torch.nn.Module) -> bool:
    """A ParameterList is no callable; its parameters are used by the parent."""
    return isinstance(module, (torch.nn.ParameterList, torch.nn.ParameterDict))
