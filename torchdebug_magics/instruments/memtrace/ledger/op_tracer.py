"""Every torch storage: which are alive, by a census, and which ops make new ones, by which line and module and in which phase."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Chain, Ledger, Place, Places, Span
from torchdebug_magics.instruments.memtrace.trace import ACTIVATION, BUFFER, GRADIENT, OPTIMIZER_STATE, PARAMETER
from torchdebug_magics.memory.objects import saved_in
from torchdebug_magics.probing.dispatch import ResultListener, modes, put_unnoticed
from torchdebug_magics.probing.graphs import is_graph_leaf, upstream
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import ModuleCalls, live_kinds
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.storages import owner_of, storages
from torchdebug_magics.probing.tensors import tensors_in


class Census:
    """All that is found by the garbage collector's list of objects, and by the autograd graphs that hang on it."""

    def __init__(self) -> None:
        found = live_kinds(torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
        self.tensors = [tensor for tensor in found[torch.Tensor] if not isinstance(tensor, FakeTensor)]
        self.modules = [module for module in found[torch.nn.Module] if "_modules" in getattr(module, "__dict__", ())]
        self.optimizers = found[torch.optim.Optimizer]

    def storages(self) -> Iterator[tuple[torch.UntypedStorage, str]]:
        """(storage, what it is if nothing else is known of it); one may come several times."""
        for tensor in self.tensors:
            if is_graph_leaf(tensor):
                yield from ((storage, "") for storage in _of(tensor))
        for tensor in saved_tensors(tensor.grad_fn for tensor in self.tensors if has_graph(tensor)):
            yield from ((storage, ACTIVATION) for storage in _of(tensor))
        for tensor in self.tensors:
            if not is_graph_leaf(tensor):
                yield from ((storage, "") for storage in _of(tensor))

    def mark(self, ledger: Ledger) -> None:
        """Say of each block in the ledger what it is to a model, where it is anything."""
        for module in self.modules:
            mark(ledger, module._buffers.values(), BUFFER)
        parameters = [tensor for tensor in self.tensors if is_graph_leaf(tensor) and tensor.requires_grad]
        parameters += [
            parameter for module in self.modules for parameter in module._parameters.values() if parameter is not None
        ]  # frozen ones, too
        mark(ledger, parameters, PARAMETER)
        mark_gradients(ledger, parameters)
        for optimizer in self.optimizers:
            mark_state(ledger, optimizer)


def saved_tensors(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """What autograd keeps for the backward pass of these nodes and all before them. No unpack hook of the user's is run."""
    return (held for node in upstream(roots) for _, held in saved_in(node) if isinstance(held, torch.Tensor))


def mark(ledger: Ledger, tensors: Iterable[torch.Tensor | None], role: str, *, is_called: bool = False) -> None:
    """Say what the blocks of these tensors are; `is_called`: a model was called with them."""
    ledger.settle()
    for storage in (storage for tensor in tensors if tensor is not None for storage in _of(tensor)):
        if (block := ledger.live.get(storage._cdata)) is not None:
            block.role = role
            block.is_called |= is_called


def mark_gradients(ledger: Ledger, parameters: Iterable[torch.Tensor]) -> None:
    """Say which blocks are the gradients of these leaves."""
    mark(ledger, (parameter.grad for parameter in parameters if is_graph_leaf(parameter)), GRADIENT)


def mark_state(ledger: Ledger, optimizer: torch.optim.Optimizer) -> None:
    """Say which blocks an optimizer keeps from step to step."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    mark(ledger, (held for held in tensors_in(list(optimizer.state.values())) if id(held) not in parameters), OPTIMIZER_STATE)


def has_graph(tensor: torch.Tensor) -> bool:
    """Whether it has a history."""
    # Asked of a view whose base was written in place, torch makes the graph anew: not for us to cause.
    try:
        return tensor.requires_grad and not tensor.is_leaf
    except RuntimeError:  # see `is_graph_leaf`
        return False


def _of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    try:
        return list(storages(tensor))
    except Exception:  # noqa: BLE001 - a subclass of the user's that does not tell what it is made of: it has no memory of its own
        return []


_MADE_ELSEWHERE = ("aten.lift_fresh", "aten.set_", "aten.detach_copy")
"""Ops whose result was made by torch just before, where no mode sees it: ``torch.tensor(...)``, ``torch.load``."""
_JOINS = {torch.ops.aten.cat.default: 0, torch.ops.aten.constant_pad_nd.default: 0, torch.ops.aten.copy_.default: 1}
"""By which a tensor comes to hold an older one, and more, and which argument that is: ``vstack`` and the like come to it, too."""
_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_CUDA = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|B|KiB|MiB|GiB|TiB)")
_CPU = re.compile(r"you tried to allocate (\d+) bytes")
_WORDS = ("out of memory", "not enough memory", "can't allocate memory")


class Tracer:
    """Keeps the ledger while it is `on`."""

    def __init__(self, ledger: Ledger, places: Places, hooks: Hooks, guard: Guard, risen: Callable[[], None]) -> None:
        self.ledger = ledger
        self.is_on = False
        self.ops_count = 0
        self.borrowed_bytes = 0
        """Of other libraries' memory that tensors were made of (``from_numpy``)."""
        self.mapped_bytes = 0
        """Of mapped files, such as a checkpoint's; in the ledger, too."""
        self.iteration = 0
        self.swells = False
        """Whether a tensor has become larger inside a call, where the next step is seen only if it is followed."""
        self.out_of_memory: OutOfMemory | None = None
        """The last time that memory was refused."""
        self.places = places
        self.hooks = hooks
        self._calls = ModuleCalls((), hooks)
        self._guard = guard
        self._risen = risen
        """Called when so much is alive as the ledger has been told to wait for."""
        self._lent: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._below = len(modes())
        """Modes that were there before."""
        self._stack = ExitStack()

    def begins(self, models: Iterable[torch.nn.Module]) -> None:
        """The cell begins; `models` are no parts of others."""
        self._calls = ModuleCalls(models, self.hooks)
        self._below = len(modes())

    def on(self) -> None:
        """Follow ops from here."""
        if not self.is_on:
            self.is_on = True
            self._calls.attach(self._stack)
            put_unnoticed(self._stack, ResultListener(self._seen, self._raised, self.hooks, takes_apart=True), self._below)

    def off(self) -> None:
        """Follow none; what is alive is followed to its death all the same."""
        if self.is_on:
            self.is_on = False
            self._stack.close()

    def adopt_all(self, census: Census) -> None:
        """Take all that is alive and not yet known into the ledger."""
        for storage, role in census.storages():
            if self.ledger.known(storage) is None and (block := self._adopt(storage)) is not None:
                block.role = role
        census.mark(self.ledger)

    def took(self, result: object) -> None:
        """Compiled code has returned that: it, and what its graph has saved, is booked on the line of the call."""
        given = list(tensors_in(result))
        place, module = self.places.here(sys._getframe()), self._module()
        if self.places.nodes.has_new_node():
            self.places.nodes.add((place, module))
        for tensor in (*given, *saved_tensors(one.grad_fn for one in given if has_graph(one))):
            for storage in storages(tensor):
                if self.ledger.known(storage) is None and not self._is_lent(storage):
                    self._book(storage, place, module, "")

    def returned(self, output: object) -> None:
        """The call of a model has given that back."""
        for storage in (storage for tensor in tensors_in(output) for storage in storages(tensor)):
            if (block := self.ledger.known(storage)) is not None:
                block.is_returned = True

    def _seen(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        try:
            self.ops_count += 1
            in_backward = torch._C._current_graph_task_id() != -1
            if not in_backward and self.places.nodes.has_new_node():
                self.places.nodes.add((self.places.here(sys._getframe()), self._module()))
            if isinstance(result, torch.Tensor):
                self._look(func, result, in_backward=in_backward)
                if func in _JOINS and len(args) > _JOINS[func]:
                    self._join(args[_JOINS[func]], result)
            elif isinstance(result, (tuple, list)):
                for one in result:
                    if isinstance(one, torch.Tensor):
                        self._look(func, one, in_backward=in_backward)
        except Exception as error:  # noqa: BLE001 - as the guard, without the cost of a call for every op
            self._guard.note(f"following an op failed: {type(error).__name__}: {error}")

    def _look(self, func: Any, tensor: torch.Tensor, *, in_backward: bool) -> None:
        for storage in storages(tensor):
            before = self.ledger.live.get(storage._cdata)
            block = self.ledger.known(storage)
            if block is not None and before is not None and block.bytes > before.bytes > 0:
                self._resized(before, block, in_backward=in_backward)
            if block is None:
                if _gives_new_memory(func):
                    self._add(func, storage, in_backward=in_backward)
                else:
                    self._adopt(storage)

    def _resized(self, before: Block, block: Block, *, in_backward: bool) -> None:
        """A tensor was made larger where it is, as by `resize_`: what it has now was asked for here."""
        block.place, block.module, _ = self._asked(in_backward=in_backward)
        block.is_old, block.iteration = False, self.iteration
        block.chain = before.chain or Chain(before.bytes, before.iteration or self.iteration)
        block.chain.grew(self.iteration)

    def _add(self, func: Any, storage: torch.UntypedStorage, *, in_backward: bool) -> None:
        if self._is_lent(storage):
            return
        self.ledger.op = str(func)
        self._book(storage, *self._asked(in_backward=in_backward))
        if self.ledger.total.now_bytes >= self.ledger.rises_at_bytes:
            self._risen()

    def _book(self, storage: torch.UntypedStorage, place: Place | None, module: str, role: str) -> None:
        block = Block(storage.nbytes(), str(storage.device), self.ledger.span, place, module)
        block.role, block.iteration = role, self.iteration
        if place is not None:
            if self.iteration:
                place.steps[block.source].add(self.iteration)
            place.count += 1
            block.nth = place.count
        self.ledger.add(storage, block)

    def _join(self, parts: Any, whole: torch.Tensor) -> None:
        """Whether what was joined is larger by what the same line joined to it before."""
        joined = self.ledger.known(whole.untyped_storage())
        if joined is None or joined.place is None or joined.chain is not None:
            return
        for part in parts if isinstance(parts, (list, tuple)) else (parts,):
            before = next((self.ledger.known(storage) for storage in storages(part)), None)
            if before is not None and before.place is joined.place and before.bytes < joined.bytes:
                joined.chain = before.chain or Chain(before.bytes, before.iteration, _grown(part, whole))
                joined.chain.grew(joined.iteration)
                # What a step both makes and joins, as the empty cache of a transformer, says nothing about the next step.
                self.swells |= not self.ledger.span.is_between and before.iteration < joined.iteration
                return

    def _asked(self, *, in_backward: bool) -> tuple[Place | None, str, str]:
        """(line, module, role) of the op that runs; in a backward pass, those of the forward's op that it is the slope of."""
        module = self._module()
        if in_backward and not module:
            made = self.places.of_node()
            if made is not None:
                return *made, ""
            return self.places.here(sys._getframe()), "", ""
        role = ACTIVATION if in_backward and torch.is_grad_enabled() else ""  # a checkpoint runs the forward again
        return self.places.here(sys._getframe()), module, role

    def _adopt(self, storage: torch.UntypedStorage) -> Block | None:
        """One that no op was seen to make."""
        if self._is_lent(storage):
            return None
        block = Block(storage.nbytes(), str(storage.device), self.ledger.span, None, "")
        block.iteration = self.iteration
        self.ledger.op = ""
        return self.ledger.add(storage, block)

    def _is_lent(self, storage: torch.UntypedStorage) -> bool:
        if storage._cdata in self._lent:
            return True
        owner = owner_of(storage)
        if owner == "borrowed":
            self._lent[storage._cdata] = storage
            self.borrowed_bytes += storage.nbytes()
        elif owner == "file":
            self.mapped_bytes += storage.nbytes()
        return owner == "borrowed"

    def _module(self) -> str:
        call = self._calls.current
        return "" if call is None else call.path or call.type

    def _raised(self, func: Any, error: BaseException) -> None:
        if isinstance(error, (RuntimeError, MemoryError)) and refused_bytes(error) is not None:
            asked = self._guard.run("the look at a refused op", self._asked, in_backward=torch._C._current_graph_task_id() != -1)
            place, module, _ = asked or (None, "", "")
            self.ledger.settle()
            alive = tuple(self.ledger.live.values())
            self.out_of_memory = OutOfMemory(id(error), str(func), module, place, self.ledger.span, alive)


def _grown(part: torch.Tensor, whole: torch.Tensor) -> int | None:
    """The dimension in which the one is longer than the other, and equal in all others."""
    grown = [dim for dim, (few, many) in enumerate(zip(part.shape, whole.shape, strict=False)) if few != many]
    return grown[0] if len(grown) == 1 and part.dim() == whole.dim() else None


@cache
def _gives_new_memory(func: Any) -> bool:
    """Whether what an op returns is its own, by its schema; the others return a view, or what they were given."""
    return str(func).startswith(_MADE_ELSEWHERE) or not any(one.alias_info is not None for one in func._schema.returns)


@dataclass(frozen=True)
class OutOfMemory:
    """One refusal; it holds no tensor, frame or exception."""

    error_id: int
    op: str
    module: str
    place: Place | None
    span: Span
    alive: tuple[Block, ...] = field(repr=False)


def refused_bytes(error: BaseException) -> int | None:
    """How much was asked for, 0 where the error does not tell; None where it is about something else."""
    text = str(error)
    if (found := _CPU.search(text)) is not None:
        return int(found[1])
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not any(words in text for words in _WORDS):
        return None
    found = _CUDA.search(text)
    return int(float(found[1]) * _UNITS[found[2]]) if found is not None else 0
