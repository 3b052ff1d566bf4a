"""The rows: one a module call, from torch's global hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.follow.parameters import NOTHING, Owned, Parameters
from torchdebug_magics.instruments.shapes.report import Row, Shape
from torchdebug_magics.probing.dry_runs.inputs import named_tensors, sizes
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.storages import sharding_of
from torchdebug_magics.report import Sharding

_MOST_YIELDED = 1000
"""Values that are taken from a generator, which may have no end."""


@dataclass(eq=False)
class Running:
    """One call that has begun, and in the end its row."""

    path: str
    module: torch.nn.Module = field(repr=False)
    number: int
    place: int
    """In the order of the calls."""
    flops: int = 0
    saved_bytes: int = 0
    inputs: tuple[Shape, ...] = ()
    outputs: tuple[tuple[str, Any, str, str], ...] | None = None
    """(name, sizes, dtype, device) of each; None while it runs, and for ever where it raised."""
    symbols: tuple[tuple[Any, ...], ...] = ()
    """The outputs' sizes with their symbols, where they are requested."""
    taken: tuple[tuple[Any, ...], ...] = ()
    """The inputs' sizes, likewise."""
    owned: Owned = NOTHING
    shards: dict[str, Sharding] = field(default_factory=dict)
    """How the outputs are sharded of which other ranks hold parts, by name."""


class Calls:
    """Follows the calls of modules; linear in their number, however deep they nest."""

    def __init__(self, root: torch.nn.Module | None, parameters: Parameters, device: str = "", *, symbolic: bool = False) -> None:
        self._symbolic = symbolic
        self._root = root
        self._parameters = parameters
        self._device = device
        self._names = PathNames()
        self._counts: dict[int, int] = {}
        self._hooks = Hooks()
        self.made: list[Running] = []
        self.stack: list[Running | None] = []
        if root is not None:
            self.name(root)

    def name(self, root: torch.nn.Module) -> None:
        """Learn the paths of all parts of a root."""
        self._names.learn(root)

    def attach(self, stack: ExitStack) -> None:
        """Follow until the stack closes."""
        self._hooks.calls_in_full(stack, self.enter, self.leave)

    def sweep(self) -> None:
        """Remove what an interrupt may have left."""
        self._hooks.sweep()

    @property
    def current(self) -> Running | None:
        """The innermost call that runs."""
        if self.stack and self.stack[-1] is not None:
            return self.stack[-1]
        return next((call for call in reversed(self.stack) if call is not None), None)

    def owned(self) -> dict[int, str]:
        """The path of each parameter and buffer, by the `id` of what stands there now."""
        root = self._root
        return {} if root is None else {id(tensor): path for path, tensor in (*root.named_buffers(), *root.named_parameters())}

    def path_of(self, module: torch.nn.Module) -> str:
        """The name of a module; of several, the one inside the call that runs."""
        return self._names.path(module, self.current)

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """A call begins."""
        if unwrapped(module) is not module:
            self.stack.append(None)
            return
        number = self._counts[id(module)] = self._counts.get(id(module), 0) + 1
        path = self.path_of(module)
        running = Running(path, module, number, len(self.made), owned=self._parameters.take(path, module))
        running.inputs = shapes(args)
        self.made.append(running)
        self.stack.append(running)

    def leave(self, _module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A call ends; `kwargs` is None where it raised."""
        if not self.stack:
            return
        running = self.stack.pop()
        outer = self.current
        if running is None:
            return
        if kwargs is not None:
            running.inputs = shapes((args, kwargs))
            self._gives(running, output)
            if self._symbolic:
                running.taken = tuple(tuple(tensor.shape) for _, tensor in named_tensors((args, kwargs)))
        if outer is not None:
            outer.flops += running.flops
            outer.saved_bytes += running.saved_bytes

    def _gives(self, running: Running, output: Any) -> None:
        running.outputs = tuple(
            (name, sizes(tensor), str(tensor.dtype).removeprefix("torch."), self._device or str(tensor.device))
            for name, tensor in named_tensors(output)
        )
        of_outputs = ((name or "output", sharding_of(tensor)) for name, tensor in named_tensors(output))
        running.shards = {name: sharding for name, sharding in of_outputs if sharding is not None}
        if self._symbolic:
            running.symbols = tuple(tuple(tensor.shape) for _, tensor in named_tensors(output))

    def yielded(self, values: Iterator[Any]) -> list[Any]:
        """What a forward that is a generator gives: it runs only now, as a part of the first call."""
        root = self.made[0]
        root.outputs = None
        self.stack.append(root)
        output = list(islice(values, _MOST_YIELDED))
        self.stack.pop()
        self._gives(root, output)
        return output

    def rows(self) -> tuple[Row, ...]:
        """All calls, in their order."""
        return tuple(_row(running) for running in self.made)


def shapes(values: Any) -> tuple[Shape, ...]:
    """The shapes of all tensors inside."""
    return tuple(sizes(tensor) for _, tensor in named_tensors(values))


def _row(running: Running) -> Row:
    outputs = running.outputs or ()
    notes = [running.owned.note] if running.owned.note else []
    if running.outputs is None:
        notes.append("did not return")
    return Row(
        path=running.path,
        type=type(running.module).__name__,
        call=running.number,
        depth=running.path.count(".") + 1 if running.path else 0,
        input_shapes=running.inputs,
        output_shapes=tuple(sizes for _, sizes, _, _ in outputs),
        output_names=tuple(name for name, _, _, _ in outputs),
        dtype=outputs[0][2] if outputs else "",
        device=outputs[0][3] if outputs else "",
        own_params=running.owned.params,
        trainable_params=running.owned.trainable,
        flops=running.flops,
        activation_bytes=running.saved_bytes,
        shards={**running.owned.shards, **running.shards},
        note=", ".join(notes),
    )


class PathNames:
    """Who holds whom under which name, learnt once a module however many ways lead to it."""

    def __init__(self) -> None:
        self._first: dict[int, str] = {}
        self._holders: dict[int, list[tuple[int, str]]] = {}

    def learn(self, root: torch.nn.Module) -> None:
        """The paths of a root and its parts."""
        for path, module in unwrapped(root).named_modules():
            if id(module) not in self._first:
                self._first[id(module)] = path
                for name, child in module._modules.items():
                    if child is not None:
                        self._holders.setdefault(id(unwrapped(child)), []).append((id(module), name))

    def path(self, module: torch.nn.Module, outer: Running | None) -> str:
        """The path of a module inside `outer`, the call that runs; its first one where that does not hold it."""
        if outer is None:
            return self._first.get(id(module), "")
        inside = self._inside(id(module), id(outer.module))
        if inside is None:
            return self._first.get(id(module)) or f"{outer.path}.{type(module).__name__}".lstrip(".")
        return f"{outer.path}.{inside}".strip(".")

    def _inside(self, module: int, outer: int) -> str | None:
        """From the module up to whoever holds it, nearest first: mostly one step, two through a list."""
        todo, paths = [module], {module: ""}
        for inner in todo:
            if inner == outer:
                break
            new = [(holder, name) for holder, name in self._holders.get(inner, ()) if holder not in paths]
            paths |= {holder: f"{name}.{paths[inner]}".rstrip(".") for holder, name in reversed(new)}
            todo += dict(new)
        return paths.get(outer)
