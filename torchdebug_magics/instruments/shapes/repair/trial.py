"""A forward with edits, tried without computing; the user's model is as before when it ends."""

from __future__ import annotations

import sys
import time
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.shapes.confirm import is_limit_of_fakes, real_error
from torchdebug_magics.instruments.shapes.faking import Fakes
from torchdebug_magics.instruments.shapes.forward import Forward, forward, zeros
from torchdebug_magics.instruments.shapes.leaves import named_tensors, rebuilt
from torchdebug_magics.instruments.shapes.ops import function_name
from torchdebug_magics.probing.guard import Guard
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.where import span, user_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torchdebug_magics.instruments.shapes.inputs import Inputs
    from torchdebug_magics.instruments.shapes.repair.edit import CallEdit, Change, Edit, OpEdit
    from torchdebug_magics.instruments.shapes.repair.facts import Facts
    from torchdebug_magics.instruments.shapes.repair.source import Site

__all__ = ["Trials", "tried_on_op"]

_QUICK_FLOPS = 2e9
"""Up to here a trial that needs data is run for real."""
_WAITING = 3
"""How many times longer than it computes all trials together may take."""
_SMALL = 1 << 20
"""Elements up to which an input is changed for real, so that its numbers are known."""


class Trials:
    """Runs one model with edits, at most so many times and for so long.

    The time is the processor's on this thread: a machine that is busy with other things finds the same fixes. A forward that waits, such as
    for a lock or a file, is kept from waiting for ever by a limit on the clock's.
    """

    def __init__(self, model: torch.nn.Module, inputs: Inputs, *, real: bool = False, most: int = 40, longest_s: float = 6.0) -> None:
        self.model = model
        self.inputs = inputs
        self.guard = Guard()
        """What of ours failed on the way."""
        self._real = real
        self._most = most
        self._left_s = longest_s
        self._until = time.monotonic() + _WAITING * longest_s
        self._slowest_s = 0.0

    @property
    def left(self) -> bool:
        """Whether one more may be run."""
        return self._most > 0 and self._slowest_s < self._left_s and time.monotonic() < self._until

    def run(self, edits: Sequence[Edit]) -> Forward | None:
        """The forward with these edits; None where it cannot be told how it would go."""
        self._most -= 1
        began = time.thread_time()
        try:
            return self._run(edits)
        finally:
            took_s = time.thread_time() - began
            self._left_s -= took_s
            self._slowest_s = max(self._slowest_s, took_s)

    def _run(self, edits: Sequence[Edit]) -> Forward | None:
        if self._real:
            return self._with(edits, None)
        run = self._with(edits, Fakes())
        if run is None or run.error is None:
            return run
        limited = is_limit_of_fakes(run.error)
        if not limited and not run.confirmed and run.failed is not None and run.failed.error is run.error:
            tried, error = real_error(run.failed)
            limited = tried and error is None
        if not limited:
            return run
        on_meta = any(one.device.type == "meta" for one in self.model.parameters())
        return None if on_meta or run.flops > _QUICK_FLOPS else self._with(edits, None)

    def _with(self, edits: Sequence[Edit], fakes: Fakes | None) -> Forward | None:
        inputs: Any = self.inputs
        changes = [(name, change) for edit in edits for name, change in edit.inputs.items()]
        if changes:
            inputs = _Changed(self.inputs, changes)
        before = RandomState.take()
        try:
            with _changed(self.model, edits, fakes) as model:
                return forward(model, inputs, fakes, instead=_Instead([one for edit in edits for one in edit.ops]), trial=True)
        except Exception:  # noqa: BLE001 - an edit that cannot even be made, such as a permutation of too few dimensions
            return None
        finally:
            before.put_back()


def tried_on_op(facts: Facts, edit: Edit) -> bool | None:
    """Whether an op outside every model comes through with an edit, on fakes made of its operands; None where that cannot be told."""
    if len(edit.ops) != 1 or edit.modules or edit.calls or edit.inputs or edit.parameters or edit.attributes:
        return None
    edited = edit.ops[0]
    known = facts.values

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        values = known(tensor) if not tensor.is_floating_point() else None
        return values if values is not None else torch.zeros(tensor.shape, dtype=tensor.dtype)

    if sum(one.tensor.numel() for one in facts.operands) > _SMALL:
        return None
    before = RandomState.take()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            edited.run(facts.func, rebuilt(facts.args, stand_in), rebuilt(dict(facts.kwargs), stand_in))
    except Exception:  # noqa: BLE001 - whatever torch says of the changed operands
        return False
    finally:
        before.put_back()
    return True


class _Changed:
    """Inputs of which some tensors are changed before the forward begins."""

    def __init__(self, inputs: Inputs, changes: Sequence[tuple[str, Change]]) -> None:
        self._inputs = inputs
        self._changes = changes
        self.args, self.kwargs = inputs.args, inputs.kwargs

    def made(self, model: torch.nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor], zeros: Callable[..., torch.Tensor]) -> Inputs:
        """As `Inputs.made`."""
        inputs = self._inputs
        for name, change in self._changes:
            inputs = _with_change(inputs.made(model, lambda tensor: tensor, zeros), name, change, stand_in)
        return inputs.made(model, stand_in, zeros)


def _with_change(inputs: Inputs, name: str, change: Change, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    target = dict(named_tensors(inputs.named_values())).get(name)

    def one(tensor: torch.Tensor) -> Any:
        if tensor is not target:
            return tensor
        with torch.no_grad():
            # A small one for real, so that its numbers stay known.
            return change.apply(tensor if tensor.numel() <= _SMALL else stand_in(tensor))

    return replace(inputs, args=rebuilt(inputs.args, one), kwargs=rebuilt(dict(inputs.kwargs), one))


class _Instead:
    """Other functions at certain places of the user's code."""

    def __init__(self, edits: Sequence[OpEdit]) -> None:
        self._edits = edits

    def get(self, _number: int, func: Any, /) -> Any:
        """By where the user's code stands now."""
        name = function_name(func)
        for edit in self._edits:
            if edit.op == name and _stands_at(edit.site):
                run = edit.run
                return lambda *args, **kwargs: run(func, args, kwargs)
        return func


def _stands_at(site: Site) -> bool:
    frame = user_frame(sys._getframe(1))
    if frame is None or frame.f_code is not site.code:
        return False
    return frame.f_lasti == site.instruction or span(frame.f_code, frame.f_lasti) == span(site.code, site.instruction)


@contextmanager
def _changed(model: torch.nn.Module, edits: Sequence[Edit], fakes: Fakes | None) -> Iterator[torch.nn.Module]:
    """The model with other modules, parameters and calls, put back at the end."""
    with ExitStack() as stack:
        for edit in edits:
            for path, make in edit.modules.items():
                old = model.get_submodule(path)
                new = _filled(make(old), old, fakes)
                if not path:
                    model = new
                    continue
                for table, name in _places(model, old):
                    stack.callback(table.__setitem__, name, old)
                    table[name] = new
            for path, numbers in edit.attributes.items():
                own = model.get_submodule(path).__dict__
                stack.callback(own.update, {name: own[name] for name in numbers})
                own.update(numbers)
            for path, sizes in edit.parameters.items():
                _put_parameter(model, path, sizes, fakes, stack)
            for call in edit.calls:
                _put_call(model, call, stack)
        yield model


def _places(model: torch.nn.Module, part: torch.nn.Module) -> list[tuple[dict[str, Any], str]]:
    return [(module._modules, name) for module in model.modules() for name, child in module._modules.items() if child is part]


def _filled(new: torch.nn.Module, old: torch.nn.Module, fakes: Fakes | None) -> torch.nn.Module:
    """Made without memory so far: with parameters where those of the old one are."""
    like = next(old.parameters(), None)
    for module in new.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.device.type == "meta":
                    table[name] = _like(tensor, like, fakes)
    return new


def _like(tensor: torch.Tensor, like: torch.Tensor | None, fakes: Fakes | None) -> Any:
    device = torch.device("cpu") if like is None or like.device.type == "meta" else like.device
    with torch.no_grad():
        made = zeros(tuple(tensor.shape), tensor.dtype, device) if fakes is None else fakes.zeros(tuple(tensor.shape), tensor.dtype, device)
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def _put_parameter(model: torch.nn.Module, path: str, sizes: tuple[int, ...], fakes: Fakes | None, stack: ExitStack) -> None:
    owner, _, name = path.rpartition(".")
    table = model.get_submodule(owner)._parameters
    old = table[name]
    stack.callback(table.__setitem__, name, old)
    assert old is not None
    table[name] = _like(torch.nn.Parameter(torch.empty(sizes, dtype=old.dtype, device="meta"), old.requires_grad), old, fakes)


def _put_call(model: torch.nn.Module, call: CallEdit, stack: ExitStack) -> None:
    module = model.get_submodule(call.path)
    inner = module.forward
    own = module.__dict__
    had = own.get("forward")

    def forward_changed(*args: Any, **kwargs: Any) -> Any:
        if call.site is None or _stands_at(call.site):
            args, kwargs = call.arguments(args, kwargs)
            return call.result(inner(*args, **kwargs)) if call.result is not None else inner(*args, **kwargs)
        return inner(*args, **kwargs)

    stack.callback(own.pop, "forward", None) if had is None else stack.callback(own.__setitem__, "forward", had)
    own["forward"] = forward_changed
