"""One forward of a model, followed call by call and op by op, which leaves no trace in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import replace
from inspect import isgenerator
from io import StringIO
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.follow.module_calls import Calls
from torchdebug_magics.instruments.shapes.follow.origins import Instead, Origins
from torchdebug_magics.instruments.shapes.follow.parameters import Parameters
from torchdebug_magics.instruments.shapes.follow.saved import Saved
from torchdebug_magics.instruments.shapes.follow.seen import Forward
from torchdebug_magics.instruments.shapes.follow.stricter import check_bounds, check_dtypes, check_kernels, check_strictly
from torchdebug_magics.probing.contents import Writes
from torchdebug_magics.probing.dry_runs.arithmetic import Arithmetic, Copies
from torchdebug_magics.probing.dry_runs.faking import Fakes, ValueFailure
from torchdebug_magics.probing.dry_runs.flops import FlopFormulas, NoFormulas
from torchdebug_magics.probing.dry_runs.inputs import Inputs, named_tensors, zeros
from torchdebug_magics.probing.dry_runs.untouched import answers, untouched
from torchdebug_magics.probing.guard import Guard
from torchdebug_magics.probing.hooks import Hooks


def forward(
    model: torch.nn.Module,
    inputs: Inputs,
    fakes: Fakes | None,
    *,
    instead: Instead | None = None,
    trial: bool = False,
    symbolic: bool = False,
) -> Forward:
    """Call ``model(*inputs.args, **inputs.kwargs)`` on fakes, or on real tensors where there are none.

    ``instead`` replaces single functions by their number in the run. A trial prints nothing. In a `symbolic` one sizes may be symbols: they
    are kept as such, and neither FLOPs are counted nor what a backward pass would need.
    """
    began, computing = time.monotonic(), time.thread_time()
    parameters = Parameters(model)
    device = "meta" if any(one.device.type == "meta" for one in model.parameters()) else ""
    calls, writes = Calls(model, parameters, device, symbolic=symbolic), Writes()
    formulas, guard = NoFormulas() if symbolic else FlopFormulas(), Guard()
    saved = Saved(calls, Hooks(), guard)
    origins = Origins(calls, instead, fakes, forward.__code__, guard)
    check = _checks(fakes) if fakes is not None and not symbolic else None
    arithmetic = Arithmetic(calls, formulas, fakes, check, saved=None if symbolic else saved, writes=writes)
    stand_in, described = (fakes.of, fakes.zeros) if fakes is not None else _for_real(writes)
    error: Exception | None = None
    output, confirmed = None, False
    given = inputs.made(model, stand_in, described)
    origins.begin(given.named_values() if given.are_named else {})
    with ExitStack() as stack:
        stack.callback(calls.sweep)
        if trial:
            stack.enter_context(redirect_stdout(StringIO()))
        saved.leave_out(model)
        stack.enter_context(untouched(model, (inputs.args, inputs.kwargs), stand_in, writes, guard))
        saved.leave_out(model)
        saved.begin(tensor for _, tensor in named_tensors((given.args, given.kwargs)))
        originals = parameters.stand_ins(model)
        calls.attach(stack)
        if not symbolic:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved.counting())
        if fakes is not None:
            stack.enter_context(fakes.mode)
            stack.enter_context(answers(fakes))
        stack.enter_context(arithmetic)
        stack.enter_context(origins)
        try:
            output = model(*given.args, **given.kwargs)
            if isgenerator(output):
                with closing(output):
                    output = calls.yielded(output)
        except ValueFailure as failure:
            confirmed = True
            error = failure.error.with_traceback(failure.__traceback__)
            if origins.failed is not None and origins.failed.error is failure:
                origins.failed = replace(origins.failed, error=error)
        except Exception as raised:  # noqa: BLE001 - whatever the user's forward raises is what is to be explained
            error = raised
    return Forward(
        calls=calls,
        parameters=parameters,
        formulas=formulas,
        flops=arithmetic.total,
        has_shared_flops=arithmetic.has_shards,
        saved_bytes=saved.total_bytes,
        given=given,
        output=output,
        error=error,
        failed=origins.failed,
        confirmed=confirmed,
        unchecked=tuple(sorted(origins.unchecked)),
        used=frozenset(originals.get(one, one) for one in origins.used),
        fakes=fakes,
        made=origins.made,
        reached=origins.count + len(calls.made),
        took_s=time.monotonic() - began,
        computed_s=time.thread_time() - computing,
        problems=tuple(guard.problems),
        notes=tuple(guard.notes),
        suspect=origins.suspects.first,
    )


def _checks(fakes: Fakes) -> Callable[..., None]:
    """What real ops refuse and fake ones let through."""

    def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_dtypes(func, args, kwargs)
        check_bounds(fakes, func, args)
        check_strictly(fakes, func, args)
        check_kernels(fakes, func, args)

    return check


def _for_real(writes: Writes) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[..., torch.Tensor]]:
    """Copies of tensors, and real ones for descriptions, into which the forward may write."""
    copies = Copies()

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        copy = copies.of(tensor)
        writes.made(copy, tensor)
        return copy

    def described(*description: Any) -> torch.Tensor:
        made = zeros(*description)
        writes.made(made)
        return made

    return copied, described
