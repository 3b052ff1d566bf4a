"""One forward of a model, followed call by call and op by op, which leaves no trace in it."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from inspect import isgenerator
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException

from torchdebug_magics.instruments.shapes.follow.module_calls import Calls
from torchdebug_magics.instruments.shapes.follow.origins import Origins
from torchdebug_magics.instruments.shapes.follow.parameters import Parameters
from torchdebug_magics.instruments.shapes.follow.saved import Saved
from torchdebug_magics.instruments.shapes.follow.seen import Failed, Forward
from torchdebug_magics.instruments.shapes.follow.stricter import check_strictly
from torchdebug_magics.probing.dry_runs.arithmetic import Arithmetic, Copies
from torchdebug_magics.probing.dry_runs.faking import Fakes, ValueFailure
from torchdebug_magics.probing.dry_runs.flops import FlopFormulas, NoFormulas
from torchdebug_magics.probing.dry_runs.inputs import Inputs, named_tensors, rebuilt
from torchdebug_magics.probing.dry_runs.untouched import answers, untouched
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.safety import Guard, quiet
from torchdebug_magics.probing.state.contents import Writes
from torchdebug_magics.probing.state.rng import RandomState

_LARGEST = 1 << 26
"""Elements that are allocated to get PyTorch's own message."""
_PRODUCTS = frozenset({"linear", "matmul", "__matmul__", "mm", "bmm"})
_LIMITS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
_LIMIT_NAMES = frozenset({"GuardOnDataDependentSymNode", "FakeTensorDeviceMismatchError", "PendingUnbackedSymbolNotFound", "UserError"})
_LIMIT_WORDS = ("not supported for tensor subclasses", "FakeTensor", "fake tensor", "FakeScriptObject", "meta tensor", "Meta")


def forward(
    model: torch.nn.Module,
    inputs: Inputs,
    fakes: Fakes | None,
    *,
    instead: Callable[[Any], Any] | None = None,
    trial: bool = False,
    symbolic: bool = False,
) -> Forward:
    """Call ``model(*inputs.args, **inputs.kwargs)`` on fakes, or on real tensors where there are none.

    ``instead`` gives what runs in the place of a function. A trial prints nothing. In a `symbolic` one sizes may be symbols: they
    are kept as such, and neither FLOPs are counted nor what a backward pass would need.
    """
    began, computing = time.monotonic(), time.thread_time()
    parameters = Parameters(model)
    device = "meta" if any(parameter.device.type == "meta" for parameter in model.parameters()) else ""
    calls, writes = Calls(model, parameters, device, symbolic=symbolic), Writes()
    formulas, guard = NoFormulas() if symbolic else FlopFormulas(), Guard()
    saved = Saved(calls, Hooks(), guard)
    origins = Origins(calls, instead, fakes, forward.__code__, guard)
    check = partial(check_strictly, fakes) if fakes is not None and not symbolic else None
    arithmetic = Arithmetic(calls, formulas, fakes, check, saved=None if symbolic else saved, writes=writes)
    stand_ins = fakes if fakes is not None else Copies(writes)
    error: Exception | None = None
    output, confirmed = None, False
    given = inputs.made(model, stand_ins.of, stand_ins.zeros)
    origins.begin(given.named_values() if given.are_named else {})
    with ExitStack() as stack:
        stack.callback(calls.sweep)
        if trial:
            stack.enter_context(quiet())
        saved.leave_out(model)
        stack.enter_context(untouched(model, (inputs.args, inputs.kwargs), stand_ins.of, writes, guard))
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
        used=frozenset(originals.get(tensor_id, tensor_id) for tensor_id in origins.used),
        fakes=fakes,
        made=origins.made,
        reached=origins.count + len(calls.made),
        took_s=time.monotonic() - began,
        computed_s=time.thread_time() - computing,
        problems=tuple(guard.problems),
        notes=tuple(guard.notes),
        suspect=origins.suspects.first,
    )


def is_limit_of_fakes(error: BaseException) -> bool:
    """Whether the error speaks of tensors without data rather than of the model."""
    chain: BaseException | None = error
    while chain is not None:
        names = {kind.__name__ for kind in type(chain).__mro__}
        # Python names the types of what it cannot add: that they are fakes is not the reason.
        spoken = not (isinstance(chain, TypeError) and "unsupported operand" in str(chain))
        if isinstance(chain, _LIMITS) or names & _LIMIT_NAMES or (spoken and any(word in str(chain) for word in _LIMIT_WORDS)):
            return True
        chain = chain.__cause__
    return isinstance(error, NotImplementedError)


def real_error(failed: Failed) -> tuple[bool, Exception | None]:
    """(whether it was tried, the error) of the failed op on real zeros of the same shapes; no error where it works on real tensors."""
    size = sum(math.prod(tensor.shape) for _, tensor in named_tensors((failed.args, failed.kwargs)))
    if size > _LARGEST and not _is_refused(failed):
        return False, None
    real = _zeros if size <= _LARGEST else lambda tensor: torch.zeros((), dtype=tensor.dtype, device=_place(tensor)).expand(tensor.shape)
    try:
        # With gradients, products of more than two dimensions are taken apart otherwise, and refuse in other words.
        with RandomState.kept(), warnings.catch_warnings(), torch.set_grad_enabled(torch.is_grad_enabled() and _is_refused(failed)):
            warnings.simplefilter("ignore")
            failed.func(*rebuilt(failed.args, real), **rebuilt(failed.kwargs, real))
    except Exception as error:  # noqa: BLE001 - whatever torch says
        return True, error
    return True, None


def _is_refused(failed: Failed) -> bool:
    """A matrix product whose inner sizes differ: torch looks at the shapes before it computes anything."""
    if failed.op not in _PRODUCTS or len(failed.operands) < 2:  # noqa: PLR2004 - a product has two factors
        return False
    first, second = (tuple(tensor.shape) for _, tensor in failed.operands[:2])
    inner = -1 if failed.op == "linear" else -2
    return min(len(first), len(second)) > 1 and first[-1] != second[inner]


def _zeros(tensor: torch.Tensor) -> Any:
    if tensor.layout is torch.sparse_coo:
        return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, layout=tensor.layout, device=_place(tensor))
    made = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=_place(tensor)).zero_()
    return made.requires_grad_() if tensor.requires_grad else made


def _place(tensor: torch.Tensor) -> torch.device:
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device
