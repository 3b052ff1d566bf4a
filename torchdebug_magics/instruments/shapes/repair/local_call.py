"""The failed call, asked again on ``meta``: which other sizes, layouts or modules it would have taken."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.repair.edit import Repair, at_tensor
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand, Sizes, is_loss
from torchdebug_magics.instruments.shapes.repair.rebuild import arguments
from torchdebug_magics.probing.dry_runs.inputs import named_tensors, rebuilt, sizes

_MOST = 12
"""Mismatches that are looked at."""
_SMALL = 1 << 18
"""Elements up to which a call is asked with zeros."""
_MOST_ASKED = 1_000
"""Sizes of all operands that the call is asked for."""


@dataclass(frozen=True, eq=False)
class Mismatch:
    """One size of an operand with which the call fails, and with another in its place succeeds."""

    places: tuple[int, ...]
    """Which operands these are: the same tensor may be given twice, and two states have one shape."""
    operand: Operand
    dims: tuple[int, ...]
    """Counted from the end: -1 is the last one. Several where the operand has this size several times."""
    got: int
    wanted: int

    @property
    def at(self) -> int:
        """The place of the operand."""
        return self.places[0]

    @property
    def dim(self) -> int:
        """The last dimension that has the size."""
        return self.dims[0]

    @property
    def sizes(self) -> Sizes:
        """The shape that would have been taken."""
        many = len(self.operand.sizes)
        return tuple(self.wanted if at - many in self.dims else size for at, size in enumerate(self.operand.sizes))


class LocalCall:
    """The op that failed; or the module of torch's, where one of these failed, as its arguments are what the user wrote."""

    def __init__(self, facts: FailureFacts) -> None:
        whole = facts.calls_module and not is_loss(facts.module) and facts.call is not None and facts.call.module is facts.module
        self._device = "meta"
        self._module = _without_data(facts.module, "meta") if whole else None
        self.facts = replace(facts, operands=facts.given) if self._module is not None else facts
        """The same failure, with those operands that are asked for."""
        self.operands = self.facts.operands
        self._args: Any = (facts.args, facts.kwargs)
        if self._module is not None and facts.call is not None:
            self._args = (facts.call.args, dict(facts.call.kwargs))
        if self.operands and self.gives():  # some ops ask less of what has no data
            self.compute()

    def compute(self) -> bool:
        """Ask with zeros from now on, where that is not much to compute."""
        weights = [*self._module.parameters()] if self._module is not None else []
        if self._device == "cpu" or sum(tensor.numel() for tensor in (*weights, *(operand.tensor for operand in self.operands))) > _SMALL:
            return False
        self._device, self._module = "cpu", _without_data(self._module, "cpu")
        return True

    @property
    def by_module(self) -> bool:
        """Whether a module is asked."""
        return self._module is not None

    def gives(
        self, changes: Mapping[int, Callable[[Any], Any]] | None = None, module: Callable[..., Any] | None = None
    ) -> list[Sizes] | None:
        """The shapes that come out with some operands, or what is called, changed; None where it fails still."""
        call = module if module is not None else self._module if self._module is not None else self.facts.func
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                args, kwargs = rebuilt(self._args, lambda tensor: _like(tensor, self._device))
                for at, change in (changes or {}).items():
                    args, kwargs = at_tensor(at, change, args, kwargs)
                return [sizes(tensor) for _, tensor in named_tensors(call(*args, **kwargs))]
        except Exception:  # noqa: BLE001 - any: an op says in its own way that it does not take this
            return None

    def takes(self, edit: Repair) -> bool:
        """Whether the call succeeds with the failing module made anew."""
        make = edit.modules.get(self.facts.path or "")
        if make is None or self._module is None:
            return False
        return self.gives(module=_without_data(make(self._module), self._device)) is not None

    def mismatches(self) -> list[Mismatch]:
        """Every size that is in the way; what is given last comes first, as a state or a mask is to fit what it is given beside."""
        present = self._present()
        # Where no size of the call would do, one near by may: a multiple of what it is divided by.
        ways: tuple[tuple[Callable[[int], list[int]], int], ...] = ((lambda _: present, _MOST), (_near, 2))
        for wanted_for, most in ways if self.by_module or len(self.operands) > 1 else reversed(ways):
            tried = itertools.islice(self._mismatches(wanted_for), _MOST_ASKED)
            if mismatches := list(itertools.islice(filter(None, tried), most)):
                return mismatches
        return []

    def _mismatches(self, wanted_for: Callable[[int], Iterable[int]]) -> Iterator[Mismatch | None]:
        """A mismatch for each size that is asked for; None where the call does not take it."""
        for places in self._groups():
            operand = self.operands[places[0]]
            many = len(operand.sizes)
            each = [(dim - many,) for dim in reversed(range(many))]
            several = [tuple(dim for (dim,) in each if operand.sizes[dim] == size) for size in dict.fromkeys(operand.sizes)]
            for dims in [*each, *(group for group in several if len(group) > 1)]:
                got = operand.sizes[dims[0]]
                for wanted in wanted_for(got):
                    mismatch = Mismatch(places, operand, dims, got, wanted)
                    resized = dict.fromkeys(places, functools.partial(resized_to, mismatch.sizes))
                    yield mismatch if wanted != got and self.gives(resized) is not None else None

    def _present(self) -> list[int]:
        """The sizes of the call; those of weights and of the arguments that the module was made with come first."""
        made_with = arguments(self.facts.module) if self._module is not None and self.facts.module is not None else None
        given = self._args if self._module is None else [(), {}]
        numbers = [*(made_with[1].values() if made_with is not None else ()), *given[0], *given[1].values()]
        each = [number for value in numbers for number in (value if isinstance(value, (tuple, list)) else [value])]
        values = [number for number in each if type(number) is int]
        weights = [size for parameter in (self._module.parameters() if self._module is not None else ()) for size in parameter.shape]
        lengths = [size for operand in sorted(self.operands, key=lambda operand: not operand.owned) for size in operand.sizes]
        return [size for size in dict.fromkeys([*values, *weights, *lengths]) if size > 0]

    def _groups(self) -> list[tuple[int, ...]]:
        """The places of several of one shape, such as two states; then those of each tensor, the last one first."""
        every = sorted(
            range(len(self.operands)),
            key=lambda at: (self.operands[at].owned, len(self.operands[at].sizes) if self.operands[at].owned else 0, -at),
        )
        same = [tuple(at for at, operand in enumerate(self.operands) if operand.tensor is self.operands[place].tensor) for place in every]
        alone = [at for at, *rest in same if at and not rest and not self.operands[at].owned]
        alike = [tuple(at for at in sorted(alone) if self.operands[at].sizes == self.operands[place].sizes) for place in alone]
        return list(dict.fromkeys([*(places for places in alike if len(places) > 1), *same]))


def _near(size: int) -> list[int]:
    return [size + 1, size + 2, size + 3, *(smaller for smaller in (size - 1, size - 2) if smaller > 0)]


def resized_to(wanted: Sizes, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same kind and of another shape."""
    return tensor.new_zeros(wanted)


def _without_data(module: torch.nn.Module | None, device: str) -> torch.nn.Module | None:
    """A copy with zeros, or with nothing on ``meta``; and without hooks but those that make its weights."""
    if module is None or isinstance(module, torch.jit.ScriptModule):
        return None
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        new = _like(tensor, device)
        memo[id(tensor)] = torch.nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else new
    try:
        copied = copy.deepcopy(module, memo)
    except Exception:  # noqa: BLE001 - a module may hold what cannot be copied
        return None
    for part in copied.modules():
        part._forward_hooks.clear()
        for key, hook in list(part._forward_pre_hooks.items()):
            if not type(hook).__module__.startswith("torch."):
                del part._forward_pre_hooks[key]
        part.__dict__.pop("forward", None)
    return copied


def _like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor of the same shape, and in the same order in memory; no fake, which is slower to ask."""
    new = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)
    return new if device == "meta" else new.zero_()
