"""From a run to its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.explain import explained
from torchdebug_magics.instruments.shapes.follow.parameters import NOTHING, Owned, Parameters
from torchdebug_magics.instruments.shapes.follow.seen import Forward, Seen
from torchdebug_magics.instruments.shapes.outline import paths_above
from torchdebug_magics.instruments.shapes.report import Layout, Need, Row, ShapesReport
from torchdebug_magics.machine.gpus import Gpus
from torchdebug_magics.machine.limits import smallest_limit
from torchdebug_magics.probing.dry_runs.flops import FlopFormulas
from torchdebug_magics.probing.dry_runs.inputs import Inputs, named_tensors, sizes
from torchdebug_magics.probing.modules import named_followed
from torchdebug_magics.probing.safety import Guard

# Tensors of a parameter's size that an optimizer keeps beside it.
_STATE = {"SGD": 0, "SGD with momentum": 1, "Adam": 2}
_BY_HAND = "used, but not called as a module"
_UNUSED = "unused"


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
        **counted(run.parameters, run.formulas, run.flops, run.saved_bytes, has_shared=run.has_shared_flops),
        unchecked_ops=run.unchecked if seen.error is None else (),
        checked_ops=run.checked,
        unused=unused,
        mode=seen.mode,
        failure=failure,
        suspect=run.suspect if failure is None else None,
        needs=needs(seen.model, run.parameters, run.saved_bytes, run.given) if seen.error is None else (),
        layout=layout,
    )


def of_cell(rows: tuple[Row, ...], counts: Mapping[torch.nn.Module, int], guard: Guard) -> ShapesReport:
    """What the modules of a cell did; `counts` says how often each model was called in all."""
    names = [type(model).__name__ for model in counts]
    often = [(type(model).__name__, many) for model, many in counts.items() if many > 1]
    notes = [f"{name} was called {many:,} times; the first call of each input shape is shown" for name, many in often]
    return ShapesReport(problems=tuple(guard.problems), notes=(*guard.notes, *notes), model=", ".join(names), rows=rows, mode="real")


def counted(parameters: Parameters, formulas: FlopFormulas, flops: int, saved_bytes: int, *, has_shared: bool) -> dict[str, Any]:
    """What the modules hold, computed and saved, by the report's names for it."""
    totals = parameters.totals()
    costs = {"total_flops": flops, "uncounted_ops": formulas.names(), "activation_bytes": saved_bytes}
    return {**totals, **costs, "has_shared_flops": has_shared and totals["sharded_over"] > 1}


def params_only(model: torch.nn.Module, layout: Layout) -> ShapesReport:
    """The modules as they are nested, with what they hold."""
    parameters = Parameters(model)
    rows = [row_of(path, module, parameters.take(path, module)) for path, module in named_followed(model)]
    return ShapesReport(model=type(model).__name__, rows=tuple(rows), **parameters.totals(), mode="params", layout=layout)


def needs(model: torch.nn.Module, parameters: Parameters, activation_bytes: int, inputs: Inputs) -> tuple[Need, ...]:
    """An estimate for each of the common optimizers; nothing where there is nothing to train."""
    totals = parameters.totals()
    if not totals["trainable_params"]:
        return ()
    batch = next((shape[0] for _, tensor in named_tensors(inputs.named_values()) if (shape := sizes(tensor))), None)
    limit_bytes, whose = _limit(model)
    estimates = []
    for name, tensors in _STATE.items():
        need = Need(
            optimizer=name,
            parameters_bytes=parameters.local_bytes + totals["buffer_bytes"],
            gradients_bytes=parameters.trainable_bytes,
            optimizer_bytes=tensors * parameters.trainable_bytes,
            activations_bytes=activation_bytes,
            limit_bytes=limit_bytes,
            limit=whose,
            batch=batch,
        )
        if batch and limit_bytes is not None and activation_bytes:  # activations grow with the batch, the rest does not
            left_bytes = limit_bytes - (need.total_bytes - activation_bytes)
            need = replace(need, largest_batch=max(0, left_bytes * batch // activation_bytes))
        estimates.append(need)
    return tuple(estimates)


def _limit(model: torch.nn.Module) -> tuple[int | None, str]:
    """(bytes, whose) of the device that the model is on; for one that is not on a GPU yet, of the first GPU there is, or this machine."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cuda" and torch.cuda.is_initialized():
        properties = torch.cuda.get_device_properties(device)
        return int(properties.total_memory), str(properties.name)
    with Gpus() as gpus:
        gpu = next(iter(gpus.read()), None)
    if gpu is not None:
        return gpu.total_bytes, gpu.name
    limit = smallest_limit()
    return (None, "") if limit is None else (limit.limit_bytes, limit.whose)


def uncalled(model: torch.nn.Module, run: Forward) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """A row for each that holds parameters itself, so that the rows add up; and the unused ones, the outermost path of each branch."""
    called = {id(call.module) for call in run.calls.made}
    rows: list[Row] = []
    holding: set[str] = set()
    alive: set[str] = set()
    for path, module in named_followed(model):
        if id(module) in called:
            alive.add(path)
        elif run.parameters.held_by(module):
            holding.add(path)
            owned = run.parameters.take(path, module)
            is_used = any(id(param) in run.used and run.parameters.counted_at(param) == path for _, param in run.parameters.held_by(module))
            if is_used:
                alive.add(path)
            rows.append(row_of(path, module, owned, _note(module, is_used=is_used)))
    return tuple(rows), _outermost(holding, alive)


def _note(module: torch.nn.Module, *, is_used: bool) -> str:
    if not is_used:
        return _UNUSED
    return "" if isinstance(module, (torch.nn.ParameterList, torch.nn.ParameterDict)) else _BY_HAND  # nobody would call those


def _outermost(holding: set[str], alive: set[str]) -> tuple[str, ...]:
    """The paths in `holding`, and those above them, below which nothing is alive."""
    for path in list(alive):
        alive.update(paths_above(path))
    dead = {branch for path in holding for branch in (path, *paths_above(path)) if branch not in alive}
    return tuple(sorted(path for path in dead if path and (not path.count(".") or path.rpartition(".")[0] not in dead)))


def row_of(path: str, module: torch.nn.Module, owned: Owned = NOTHING, note: str = "") -> Row:
    """The row of a module without a call."""
    return Row(
        path=path,
        type=type(module).__name__,
        call=0,
        depth=path.count(".") + 1 if path else 0,
        own_params=owned.params,
        trainable_params=owned.trainable,
        shards=owned.shards,
        note=", ".join(filter(None, (note, owned.note))),
    )
