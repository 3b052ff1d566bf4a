"""A model, its inputs and its ops with edits: the user's own are as before when they end."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.shapes.follow.origins import function_name
from torchdebug_magics.probing.dry_runs.inputs import zeros
from torchdebug_magics.probing.dry_runs.leaves import named_tensors, rebuilt
from torchdebug_magics.probing.where import span, user_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torchdebug_magics.instruments.shapes.repair.edit import CallEdit, Change, Edit, OpEdit
    from torchdebug_magics.instruments.shapes.repair.source import Site
    from torchdebug_magics.probing.dry_runs.faking import Fakes
    from torchdebug_magics.probing.dry_runs.inputs import Inputs

__all__ = ["SMALL", "ChangedInputs", "ChangedOps", "with_edits"]

SMALL = 1 << 20
"""Elements up to which an input is changed on real tensors, so that its numbers are known."""


@contextmanager
def with_edits(model: torch.nn.Module, edits: Sequence[Edit], fakes: Fakes | None) -> Iterator[torch.nn.Module]:
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
            for path, make_buffer in edit.buffers.items():
                owner, _, name = path.rpartition(".")
                table = model.get_submodule(owner)._buffers
                held = table[name]
                assert held is not None
                stack.callback(table.__setitem__, name, held)
                table[name] = make_buffer(held)
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


class ChangedInputs:
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
            return change.apply(tensor if tensor.numel() <= SMALL else stand_in(tensor))

    return replace(inputs, args=rebuilt(inputs.args, one), kwargs=rebuilt(dict(inputs.kwargs), one))


class ChangedOps:
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
