"""From a run to its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.shapes.explain import explained
from torchdebug_magics.instruments.shapes.follow.parameters import Parameters
from torchdebug_magics.instruments.shapes.report import Layout, ShapesReport
from torchdebug_magics.instruments.shapes.table.training_memory import needs
from torchdebug_magics.instruments.shapes.table.uncalled import row_of, uncalled
from torchdebug_magics.probing.modules import named_followed

if TYPE_CHECKING:
    import torch

    from torchdebug_magics.instruments.shapes.examine import Seen
    from torchdebug_magics.instruments.shapes.follow.module_calls import Calls
    from torchdebug_magics.instruments.shapes.report import Failure
    from torchdebug_magics.probing.dry_runs.flops import FlopFormulas
    from torchdebug_magics.probing.guard import Guard

__all__ = ["Watched", "of_cell", "params_only", "tabulated"]


def tabulated(seen: Seen, layout: Layout) -> ShapesReport:
    """Everything that was seen, frozen."""
    run = seen.run
    failure = None if seen.error is None else explained(seen)  # first, as it may add to the problems
    further, unused = uncalled(seen.model, run) if run.error is None else ((), ())
    return ShapesReport(
        problems=(*seen.problems, *run.problems),
        notes=(*seen.notes, *run.notes),
        model=type(seen.model).__name__,
        inputs=str(seen.run.given),
        rows=run.calls.rows() + further,
        total_params=run.parameters.total,
        trainable_params=run.parameters.trainable,
        buffer_count=run.parameters.buffers,
        total_flops=run.flops,
        uncounted_ops=run.formulas.names(),
        unchecked_ops=run.unchecked if seen.error is None else (),
        checked_ops=run.checked,
        **_sharding(run.parameters, run.has_shared_flops),
        buffer_bytes=run.parameters.buffer_bytes,
        activation_bytes=run.saved_bytes,
        unused=unused,
        mode=seen.mode,
        failure=failure,
        suspect=run.suspect if failure is None else None,
        needs=needs(seen.model, run.parameters, run.saved_bytes, run.given) if seen.error is None else (),
        layout=layout,
    )


@dataclass(frozen=True, eq=False)
class Watched:
    """What was seen of the modules that a cell called."""

    calls: Calls
    parameters: Parameters
    formulas: FlopFormulas
    flops: int
    has_shared_flops: bool
    saved_bytes: int
    counts: Mapping[torch.nn.Module, int]
    """How often each model was called in all."""


def of_cell(watched: Watched, layout: Layout, failure: Failure | None, guard: Guard) -> ShapesReport:
    """What the modules of a cell did, and why it failed."""
    names = [type(model).__name__ for model in watched.counts]
    often = [(type(model).__name__, many) for model, many in watched.counts.items() if many > 1]
    notes = [f"{name} was called {many:,} times; the first call of each input shape is shown" for name, many in often]
    return ShapesReport(
        problems=tuple(guard.problems),
        notes=(*guard.notes, *notes),
        model=", ".join(names),
        rows=watched.calls.rows(),
        total_params=watched.parameters.total,
        trainable_params=watched.parameters.trainable,
        buffer_count=watched.parameters.buffers,
        total_flops=watched.flops,
        uncounted_ops=watched.formulas.names(),
        **_sharding(watched.parameters, watched.has_shared_flops),
        buffer_bytes=watched.parameters.buffer_bytes,
        activation_bytes=watched.saved_bytes,
        mode="real",
        failure=failure,
        layout=layout,
    )


def _sharding(parameters: Parameters, has_shared_flops: bool = False) -> dict[str, Any]:
    ranks = parameters.sharded_over
    sizes = {"param_bytes": parameters.bytes, "sharded_over": ranks}
    return sizes if ranks == 1 else {**sizes, "local_param_bytes": parameters.local_bytes, "has_shared_flops": has_shared_flops}


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
        **_sharding(parameters),
        buffer_bytes=parameters.buffer_bytes,
        activation_bytes=0,
        mode="params",
        layout=layout,
    )
