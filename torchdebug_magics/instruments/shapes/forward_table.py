"""``%shapes model x``: a run on fakes where that is possible, and a real one where it is not -> its table."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchdebug_magics.errors import TorchDebugError, error_line, refuse
from torchdebug_magics.format import listed
from torchdebug_magics.instrument import Examined
from torchdebug_magics.instruments.shapes.explain import explained
from torchdebug_magics.instruments.shapes.follow.forward import forward, is_limit_of_fakes, real_error
from torchdebug_magics.instruments.shapes.follow.parameters import NOTHING, Owned, Parameters, packed_weights
from torchdebug_magics.instruments.shapes.follow.seen import Forward, Seen
from torchdebug_magics.instruments.shapes.outline import layout, paths_above
from torchdebug_magics.instruments.shapes.repair.source import EditSite, caller_of
from torchdebug_magics.instruments.shapes.report import Layout, Mode, Need, Row, ShapesReport
from torchdebug_magics.machine.gpus import Gpus
from torchdebug_magics.machine.limits import smallest_limit
from torchdebug_magics.probing.distributed.this_rank import world_size
from torchdebug_magics.probing.dry_runs.faking import CannotBeFakedError, Fakes
from torchdebug_magics.probing.dry_runs.flops import FlopFormulas
from torchdebug_magics.probing.dry_runs.inputs import Inputs, named_tensors, readings, sizes, zeros
from torchdebug_magics.probing.modules import named_followed, unwrapped
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.storages import has_flat_parameters, ranks_of

_SHORT_FLOPS = 2e10
"""Up to here a real run, to confirm an error that no op raised, takes about a second."""
QUICK_FLOPS = 2e9
"""Up to here a real run, to check what values alone decide, takes a tenth of that."""
_QUICK_BYTES = 1 << 28
# Tensors of a parameter's size that an optimizer keeps beside it.
_STATE = {"SGD": 0, "SGD with momentum": 1, "Adam": 2}
_BY_HAND = "used, but not called as a module"
_UNUSED = "unused"


def examine_model(
    model: torch.nn.Module,
    *args: Any,
    keywords: Mapping[str, Any] | None = None,
    real: bool = False,
    symbolic: bool = False,
    strict: bool = False,
    **options: Any,
) -> Examined:
    """The report on ``model(*args, **keywords)``; a tuple of sizes stands for a tensor. The model is left exactly as it was.

    Further options are those of `layout`. Raises `TorchDebugError` where the first value is no module. A forward that fails does not
    raise: see ``report.failure``.
    """
    wrong = f"the first argument must be a torch.nn.Module, not {type(model).__name__}: write `%shapes model input`"
    refuse(not isinstance(model, torch.nn.Module), wrong)
    shown = layout(**options)
    if not args and not keywords:
        return Examined(params_only(_inner(model), shown))
    seen = see(model, args, dict(keywords or {}), real=real)
    report = tabulated(seen, shown)
    if symbolic and seen.error is None:
        from torchdebug_magics.instruments.shapes.symbolic import with_formulas  # noqa: PLC0415 - torch's symbols take half a second to import

        rows, symbols, problem = with_formulas(seen, report.rows)
        report = replace(report, rows=rows, symbols=symbols, problems=(*report.problems, *([problem] if problem else [])))
    return Examined(report, seen.error if strict else None)


def see(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, real: bool = False, site: EditSite | None = None) -> Seen:
    """Run under the likeliest reading of the arguments; under the next one where it fails and the arguments leave a choice.

    `site` is the user's own call, in which fixes of the arguments are written.
    """
    model = _inner(model)
    why = "`FullyShardedDataParallel` communicates in each forward: use `%shapes` before wrapping, or `--real` on all ranks"
    refuse(not real and world_size() > 1 and has_flat_parameters(model), why)
    notes: list[str] = []
    if any(is_lazy(parameter) for parameter in model.parameters()):
        model = _sized(model, next(readings(model, args, kwargs)), notes)
    first: Seen | None = None
    for reading in readings(model, args, kwargs):
        inputs = reading if site is None else replace(reading, caller=caller_of(site, reading.names))
        seen = _real(model, inputs) if real or _needs_data(model) else _fake(model, inputs)
        seen.notes += [*notes, *([inputs.note] if inputs.note else [])]
        if seen.error is None:
            return seen
        first = first or seen
        is_of_dtype = any(word in str(seen.error) for word in ("Long", "Int", "index", "dtype", "integer"))
        if not is_of_dtype and not isinstance(seen.error, (TypeError, AttributeError)):
            break
    assert first is not None
    return first


def see_call(model: torch.nn.Module, given: Mapping[str, Any], *, are_named: bool = True) -> Seen:
    """One forward with these values by name, each taken for what it is."""
    inputs = Inputs((), given, are_named=are_named)
    return _real(model, inputs) if _needs_data(model) else _fake(model, inputs)


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """What a compiler, DataParallel or DistributedDataParallel wraps: the latter sends buffers to the other ranks before each forward."""
    inner = unwrapped(model)
    if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
        return unwrapped(inner.module)
    if isinstance(inner, torch.nn.DataParallel) and inner.device_ids:
        return unwrapped(inner.module)
    return inner


def _needs_data(model: torch.nn.Module) -> bool:
    """Scripted and quantised parts hold what fakes cannot stand for."""
    return any(isinstance(module, torch.jit.ScriptModule) or next(packed_weights(module), None) is not None for module in model.modules())


def _fake(model: torch.nn.Module, inputs: Inputs) -> Seen:
    mode: Mode = "meta" if any(parameter.device.type == "meta" for parameter in model.parameters()) else "fake"
    try:
        run = forward(model, inputs, Fakes())
    except CannotBeFakedError as error:
        return _fallback(model, inputs, error)
    seen = Seen(model, run, inputs, mode, run.error)
    return _checked(seen) if run.error is None else _confirmed(seen, run.error)


def _checked(seen: Seen) -> Seen:
    """A forward that succeeded without data: run on real tensors where an op in it may refuse a value, and that is quick."""
    run = seen.run
    if _ranks(seen.model) > 1:
        return seen
    described = next(seen.inputs.specs(), None) is not None
    mixed = _is_half_meta(seen.model, seen.inputs)
    is_slow = run.flops > QUICK_FLOPS or run.saved_bytes > _QUICK_BYTES
    if is_slow or described or not (mixed or (run.unchecked and seen.mode != "meta")):
        return seen
    for_real = _real(seen.model, seen.inputs)
    if for_real.error is None:
        seen.run = replace(run, unchecked=(), checked=run.unchecked)
        return seen
    if not mixed:
        for_real.notes.append(f"ran on real tensors, as values decide what {listed([f'`{op}`' for op in run.unchecked])} rejects")
    return for_real


def _is_half_meta(model: torch.nn.Module, inputs: Inputs) -> bool:
    """Whether only some tensors are on ``meta``. That the inputs alone are elsewhere is meant: such a model is asked for its shapes."""
    own = {parameter.device.type == "meta" for parameter in (*model.parameters(), *model.buffers())}
    given = {tensor.device.type == "meta" for _, tensor in named_tensors((inputs.args, dict(inputs.kwargs)))}
    return len(own) > 1 or (own == {False} and True in given)


def _confirmed(seen: Seen, error: Exception) -> Seen:
    """What a failure on fakes is on real tensors: the same in torch's own words, or none."""
    run, failed = seen.run, seen.run.failed
    if seen.mode != "meta" and is_limit_of_fakes(error):
        return _fallback(seen.model, seen.inputs, error)
    if failed is not None and failed.error is error:
        tried, seen.error = (False, error) if run.confirmed else real_error(failed)
        if tried and seen.error is None and seen.mode != "meta":
            return _fallback(seen.model, seen.inputs, error)
        seen.error = seen.error or error
    elif seen.mode == "meta":
        seen.notes.append("the weights are on `meta`, so that a real run could not confirm this")
    elif _ranks(seen.model) > 1:
        seen.notes.append("the model is sharded, so that a real run on this rank alone could not confirm this")
    elif run.flops <= _SHORT_FLOPS:
        for_real = _real(seen.model, seen.inputs)
        if for_real.error is None:
            for_real.notes.append(f"ran on real tensors, as {_why(error)}")
            return for_real
        seen.error = for_real.error
    return seen


def _fallback(model: torch.nn.Module, inputs: Inputs, error: Exception) -> Seen:
    if (ranks := _ranks(model)) > 1:
        msg = f"{_why(error)}, and the model is sharded over {ranks} ranks: run `%shapes --real` on all of them"
        raise TorchDebugError(msg)
    for_real = _real(model, inputs)
    if for_real.error is None or str(for_real.error) != str(error):  # else it is the model's own, and not one of fakes
        for_real.notes.append(f"ran on real tensors, as {_why(error)}")
    return for_real


def _ranks(model: torch.nn.Module) -> int:
    """On how many ranks a forward of a sharded model has to run at the same time: a real one communicates."""
    return ranks_of((*model.parameters(), *model.buffers()))


def _real(model: torch.nn.Module, inputs: Inputs) -> Seen:
    run = forward(model, inputs, None)
    return Seen(model, run, inputs, "real", run.error)


def _why(error: BaseException) -> str:
    return f"the forward needs data ({error_line(error, 100)})"


def _sized(model: torch.nn.Module, inputs: Inputs, notes: list[str]) -> torch.nn.Module:
    """A copy whose lazy parts have found their sizes; the user's own stays lazy."""
    made: Any = torch.nn.UninitializedBuffer  # its stub has the arguments of another class
    lazy = [buffer for buffer in model.buffers() if is_lazy(buffer)]  # which torch cannot copy, unlike lazy parameters
    sized = copy.deepcopy(model, {id(buffer): made(buffer.requires_grad, buffer.device, buffer.dtype) for buffer in lazy})
    given = inputs.made(sized, torch.clone, zeros)
    with RandomState.kept(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):  # any: it is the user's forward, whose error the run on fakes finds again and reports
            sized(*given.args, **given.kwargs)
    notes.append("lazy modules were sized on a copy")
    return sized


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
