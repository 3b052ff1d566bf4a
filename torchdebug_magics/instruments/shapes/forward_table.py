"""``%shapes model x``: the table, from a run on fakes where that is possible and a real one where it is not."""

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
from torchdebug_magics.instruments.shapes.columns import layout
from torchdebug_magics.instruments.shapes.follow.forward import forward, is_limit_of_fakes, real_error
from torchdebug_magics.instruments.shapes.follow.parameters import packed_weights
from torchdebug_magics.instruments.shapes.follow.seen import Seen
from torchdebug_magics.instruments.shapes.repair.source import EditSite, caller_of
from torchdebug_magics.instruments.shapes.report import Mode
from torchdebug_magics.instruments.shapes.tabulate import params_only, tabulated
from torchdebug_magics.probing.distributed.this_rank import world_size
from torchdebug_magics.probing.dry_runs.faking import CannotBeFakedError, Fakes
from torchdebug_magics.probing.dry_runs.inputs import Inputs, named_tensors, readings, zeros
from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.storages import has_flat_parameters, ranks_of

_SHORT_FLOPS = 2e10
"""Up to here a real run, to confirm an error that no op raised, takes about a second."""
QUICK_FLOPS = 2e9
"""Up to here a real run, to check what values alone decide, takes a tenth of that."""
_QUICK_BYTES = 1 << 28


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
    if not isinstance(model, torch.nn.Module):
        msg = f"the first argument must be a torch.nn.Module, not {type(model).__name__}: write `%shapes model input`"
        raise TorchDebugError(msg)
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
        if not _might_be_the_reading(seen.error):
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


def _might_be_the_reading(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, (TypeError, AttributeError)) or any(word in text for word in ("Long", "Int", "index", "dtype", "integer"))


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
    if not (run.unchecked or mixed) or described or run.flops > QUICK_FLOPS or run.saved_bytes > _QUICK_BYTES:
        return seen
    if seen.mode == "meta" and not mixed:
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
