"""What must be known at the start of a step to run it again: taken at the first outermost module call, dropped after `backward()`."""

from __future__ import annotations

import ast
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.nanhunt.rerun.attempt import Place, Position, caller, frame_chain, places, same_place, span_at
from torchdebug_magics.instruments.nanhunt.rerun.written_places import BufferKeeper, Held, Namespace, places_of
from torchdebug_magics.probing.compiler import CompiledCalls
from torchdebug_magics.probing.dispatch import is_being_traced
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import OutermostCalls, fast_path_parts, live_modules, parts_of, unwrapped
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.syntax import bound_names, lists_around, nodes, read_before_bound, tree_of
from torchdebug_magics.probing.source.user_code import frames_above, is_user_code, local_values, owner
from torchdebug_magics.probing.state.contents import Kept, version_of
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.state.snapshot import OF_A_STEP, Snapshot
from torchdebug_magics.probing.tensors import is_bad, tensors_in

_MOST_RECORDED = 64
"""Arguments of outermost calls kept for one step: a loop that never calls backward() must not pile up its inputs."""


@dataclass
class Entry:
    """One outermost module call."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    versions: tuple[int, ...]
    recorded: bool = True
    copies: tuple[Kept, ...] = ()
    """Of a model that is known to write into its input: what each tensor held."""
    place: tuple[Place, ...] = ()
    """Where it was called; empty where that is not known."""

    def writes_input(self) -> bool:
        """Whether an argument was written in place since."""
        return self.versions != _versions(tuple(tensors_in((*self.args, self.kwargs))))

    def unchanged(self) -> bool:
        """Whether no argument was written in place since, or what it held is known."""
        return bool(self.copies) or not self.recorded or not self.writes_input()


@dataclass
class Step:
    """Everything since the last boundary: the outermost calls, and the state before the first of them."""

    entries: list[Entry] = field(default_factory=list)
    chain: tuple[Position, ...] = ()
    buffers: list[Held] = field(default_factory=list)
    python: list[Snapshot] = field(default_factory=list)
    live_in: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    before: torch.Tensor | None = None
    """Torch's random state when the last step was over: what the statements draw before they call the model, they drew from there."""
    backwards: int = 0
    """Backward calls since the first entry."""
    closed: bool = False
    """Whether its backward() is over: the next model call begins a new step."""
    grows_graph: bool = False
    """Whether gradients can flow from the output of any of its calls."""
    started: set[int] = field(default_factory=set)
    """Ids of the modules whose state was taken."""
    _forgotten: dict[int, Entry] = field(default_factory=dict)

    @property
    def backward_number(self) -> int:
        """Which backward() of the step was the last, 1-based; without a model call the step begins right before it."""
        return max(1, self.backwards) if self.entries else 1

    def add(self, entry: Entry) -> None:
        """One more call; of the oldest, when there are many, no more is known than that there were so many."""
        self.entries.append(entry)
        place = len(self.entries) - _MOST_RECORDED - 1
        if place >= 0:
            module = self.entries[place].module
            if id(module) not in self._forgotten:
                self._forgotten[id(module)] = Entry(module, (), {}, self.entries[0].random, (), recorded=False)
            self.entries[place] = self._forgotten[id(module)]

    def inside(self, sink: tuple[Position, ...]) -> Step | None:
        """Only what ran in the innermost function of the user's that calls backward(); None where that is all, or nothing."""
        outer = next((position.frame for position in sink if is_user_code(position.frame.f_code)), None)
        if outer is None or any(position.frame is outer for position in self.chain):
            return None
        found = [(entry, place) for entry in self.entries for place in entry.place if place[0] is outer.f_code]
        if not found:
            return None
        chain = (Position(outer, found[0][1][1]),)
        return Step(entries=[entry for entry, _ in found], chain=chain, buffers=self.buffers, python=self.python)

    def clear(self) -> None:
        """Forget all, so that nothing outlives its step because of us."""
        vars(self).update(vars(Step()))


def _versions(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    return tuple(map(version_of, tensors))


def live_in(chain: tuple[Position, ...]) -> dict[int, Mapping[str, Any]]:
    """By the id of its frame, the values of variables that the step reads and overwrites: they would be lost otherwise."""
    carried = ((position.frame, _carried(position.frame.f_code, position.instruction)) for position in chain)
    return {id(frame): local_values(frame, names) for frame, names in carried if names}


@functools.lru_cache(maxsize=256)
def _carried(code: CodeType, instruction: int) -> frozenset[str]:
    tree = tree_of(code.co_filename) if owner(code.co_filename) in {"user", "library"} else None
    statements: list[ast.stmt] = []
    for body, start in lists_around(tree, span_at((code, instruction))):
        statements += body[start:] if not statements else body[start + 1 :]
    return frozenset(read_before_bound(statements) & bound_names(*statements))


class Batches:
    """The batch that each running `DataLoader` gave last, which it does not keep itself; until it is asked for the next one."""

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def attach(self, stack: ExitStack, hooks: Hooks) -> None:
        """Keep them until the stack closes."""
        stack.callback(self._last.clear)
        hooks.loader_batches(stack, self._around)

    def bound_by(self, target: ast.expr, names: frozenset[str]) -> Iterator[dict[str, Any]]:
        """What a loop's target, or a part of it, may have bound some names to: which loader is the loop's nobody says."""
        for batch in self._last.values():
            for part in nodes(ast.expr, target):
                bound = _bound(part, batch)
                if names <= bound.keys():
                    yield {name: bound[name] for name in names}

    def bad_sources(self) -> Iterator[Any]:
        """The data sets that a bad last batch was read from."""
        for iterator, batch in self._last.items():
            if any(map(is_bad, tensors_in(batch))) and hasattr(type(iterator._dataset), "__getitem__"):
                yield iterator._dataset

    def _around(self, original: Any, iterator: Any) -> Any:
        __tracebackhide__ = True
        self._last.pop(iterator, None)
        batch = original(iterator)
        self._last[iterator] = batch
        return batch


def _bound(target: ast.expr, element: Any) -> dict[str, Any]:
    """What the names in a loop's target are bound to by an element; nothing where it does not fit. Asks its type, which cannot fail."""
    if isinstance(target, ast.Name):
        return {target.id: element}
    if not isinstance(target, (ast.Tuple, ast.List)) or not issubclass(type(element), (tuple, list, torch.Tensor)):
        return {}
    if len(target.elts) != len(element):
        return {}
    bound: dict[str, Any] = {}
    for part, value in zip(target.elts, element, strict=True):
        inner = _bound(part, value)
        if not inner:
            return {}
        bound.update(inner)
    return bound


_LEARNING_BACKWARDS = 3
"""Until then every module is watched for being called outermost; later only those that were."""


class StepRecorder:
    """Fills the step, and while `replaying` is set asks that for the arguments of each call instead."""

    def __init__(self, hooks: Hooks, guard: Guard, done: Callable[[Entry, Any], None]) -> None:
        self.step = Step()
        self.models = Models()
        self.hooks = hooks
        self.replaying: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.guard = guard
        self.between: torch.Tensor = torch.get_rng_state()
        """Torch's random state at the last boundary between steps."""
        self.batches = Batches()
        self._done = done
        self._depth = 0
        self.outermost = OutermostCalls(hooks, guard, self._before, self._after)

    def attach(self, stack: ExitStack) -> list[torch.nn.Module]:
        """Watch every module that is alive, which it returns, and those still to be made."""
        self.mark()
        stack.callback(self.models.clear)
        stack.callback(self.step.clear)
        self.batches.attach(stack, self.hooks)
        modules = list(live_modules())
        self.outermost.attach(stack, modules)
        CompiledCalls(self.hooks, self.guard, self.outermost.modules, self.outermost.is_ours, _pass, _pass).attach(stack)
        return modules

    def parameters(self) -> dict[int, torch.Tensor]:
        """The parameters of all modules entered in this step."""
        return self.models.parameters(self.step.started)

    def feed(self, feed: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """From now on outermost calls are not recorded, but given what `feed` says, and counted for themselves."""
        self.replaying, self._depth = feed, self.outermost.depth
        self.outermost.depth = 0

    def fed(self) -> None:
        """That is over, also where an interrupt inside a call has left it without an end."""
        if self.replaying is not None:
            self.replaying, self.outermost.depth = None, self._depth

    def mark(self) -> None:
        """A backward() or an update is over: what is drawn from now on is the next step's."""
        self.between = torch.get_rng_state()
        self.models.step_ends()

    def settle(self, backward_count: int) -> None:
        """After a few steps, take the hooks off whatever was never called outermost."""
        if backward_count == _LEARNING_BACKWARDS:
            self.outermost.settle()

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.replaying is not None:
            return self.replaying(module, args, kwargs)
        if not is_being_traced() and torch._C._current_autograd_node() is None:  # what a checkpoint runs again is no call of the step
            self.guard.run("the look at a model call", self._record, module, args, kwargs)
        return None

    def _after(self, module: torch.nn.Module, output: Any) -> None:
        entry = self.step.entries[-1] if self.step.entries and self.replaying is None and not is_being_traced() else None
        if entry is not None and entry.module is module and not _is_in_a_function(sys._getframe()):
            self.guard.run("the look at a model's arguments", self._see_writes, entry)
            self._done(entry, output)

    def _record(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, frame = self.step, caller(sys._getframe())
        # With its graph retained a step does not end at its backward(), but where the loop goes round.
        if step.closed or (step.backwards and same_place(step.chain, frame_chain(frame))):
            step.clear()
        if not step.entries:
            step.chain, step.before = frame_chain(frame), self.between
            step.live_in = live_in(step.chain)
        known = self.models.know(module, (one.frame for one in step.chain if is_user_code(one.frame.f_code)))
        if id(module) not in step.started:
            step.started.add(id(module))
            step.buffers += known.buffers.take()
            if known.places:
                step.python.append(Snapshot(known.places, OF_A_STEP))
        random = RandomState.take()
        tensors = tuple(tensors_in((*args, kwargs)))
        copies = tuple(map(Kept.of, tensors)) if known.writes_input else ()
        step.add(Entry(module, args, kwargs, random, _versions(tensors), copies=copies, place=places(frame)))

    def _see_writes(self, entry: Entry) -> None:
        if entry.writes_input():
            self.models.know(entry.module, ()).writes_input = True


def _is_in_a_function(frame: FrameType) -> bool:
    """Whether a `torch.autograd.Function` runs the call, as a reentrant checkpoint does: its outputs have no graph yet."""
    return not torch.is_grad_enabled() and any(map(_takes_context, frames_above(frame)))


def _takes_context(frame: FrameType) -> bool:
    """Whether the frame is the `forward` of a `torch.autograd.Function`, whose first argument is the node of the graph."""
    code = frame.f_code
    if code.co_name != "forward" or not code.co_argcount or code.co_varnames[0] == "self":
        return False
    return isinstance(frame.f_locals.get(code.co_varnames[0]), torch._C._FunctionBase)


def _pass(_told: object) -> None:
    """A compiled call is one piece: what is recorded of a step, the calls around it tell."""


@dataclass
class Known:
    """What is worked out once for a module. It is held weakly: a model that the user drops is gone."""

    module: weakref.ref[torch.nn.Module]
    parameters: dict[int, torch.Tensor]
    buffers: BufferKeeper
    places: list[Namespace]
    writes_input: bool = False
    """Whether a call of it was seen to write into its arguments."""


class Models:
    """In the order of their first calls."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._roots: list[weakref.ref[torch.nn.Module]] = []
        """Of the present step: the reruns of one step ask again and again, and each look at what is alive takes a tenth of a second."""

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
        self.step_ends()

    def step_ends(self) -> None:
        """In the next one there may be other roots."""
        self._roots = []

    def know(self, module: torch.nn.Module, callers: Iterable[FrameType]) -> Known:
        """What is known of a module; worked out at its first call, by `callers`."""
        key = id(module)
        known = self._known.get(key)
        if known is None:
            parts = list(unwrapped(module).modules())
            own = [part for part in parts if not type(part).__module__.startswith("torch.nn.")]
            parameters: dict[int, torch.Tensor] = {id(parameter): parameter for parameter in unwrapped(module).parameters()}
            gone = weakref.ref(module, lambda _: self._known.pop(key, None))
            known = self._known[key] = Known(gone, parameters, BufferKeeper(parts), places_of(own, callers))
            self.step_ends()
        return known

    def entered(self) -> list[torch.nn.Module]:
        """Those that are alive."""
        return [module for known in self._known.values() if (module := known.module()) is not None]

    def parameters(self, keys: Iterable[int]) -> dict[int, torch.Tensor]:
        """The parameters of modules, by id; to be read only."""
        held = [self._known[key].parameters for key in keys if key in self._known]
        return held[0] if len(held) == 1 else {number: one for parameters in held for number, one in parameters.items()}

    def roots(self) -> list[torch.nn.Module]:
        """Modules that were called outermost, then those that hold them, without what is a part of another."""
        held = [reference() for reference in self._roots]
        if held and all(root is not None for root in held):
            return [root for root in held if root is not None]
        entered, alive = [unwrapped(module) for module in self.entered()], list(live_modules())
        called, adopted = set(map(id, entered)), parts_of(alive)
        # What has a fused kernel carries no hook of ours, so nobody knows whether it was called: its names are good to have.
        known = {id(module) for root in entered for module in root.modules()} | fast_path_parts(alive)
        tops = [one for one in alive if id(one) not in adopted and (id(one) in known or called & set(map(id, one.modules())))]
        order = {id(module): place for place, module in enumerate(entered)}
        tops.sort(key=lambda module: order.get(id(unwrapped(module)), len(order)))
        roots = [*{id(root): root for root in [*map(unwrapped, tops), *entered]}.values()]
        self._roots = [weakref.ref(root) for root in roots]
        return roots
