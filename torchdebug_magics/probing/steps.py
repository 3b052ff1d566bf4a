"""Facts of a training that several instruments judge: the events of a step, whose a parameter is, what its optimizer and gradient say."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from types import FrameType
from typing import Any, NamedTuple

import torch

from torchdebug_magics.format import listed, plural
from torchdebug_magics.probing.dispatch import is_being_compiled, modes_aside
from torchdebug_magics.probing.graphs import leaves_of
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import live_kinds, parts_of, unwrapped
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.lines import Line, Lines
from torchdebug_magics.probing.storages import is_shard, local_of
from torchdebug_magics.probing.tensors import is_traced, tensors_in

_MOST_SEARCHES = 32
"""Each looks at every object of the process; afterwards, parameters of new models are named by their number."""
_MOST_NODES = 48
_MOST_CLIPS = 8
_KEPT_PASSES = 64
_FIRST_LOOKS, _LOOK_EVERY = 4, 64
"""Backward passes whose loss is looked at for its number of classes: the first few, then one in so many."""
_OF_TWO = "BinaryCrossEntropy"
_OF_MANY = ("NllLossBackward", "NllLoss2DBackward")
NEVER_ZEROED = "gradients accumulate over the steps: zero_grad() is missing"


def never_zeroed(optimizer: str) -> str:
    """The fix for `NEVER_ZEROED`."""
    return f"call `{optimizer}.zero_grad()` before `loss.backward()`"


def zeroed_too_early(optimizer: str) -> str:
    """What is wrong where gradients are zeroed after the backward pass that made them."""
    return f"the gradients are zeroed between backward() and `{optimizer}.step()`: the update finds none"


def never_held(names: Sequence[str]) -> str:
    """What is wrong where parameters with a gradient are in no optimizer."""
    shown = listed([f"`{name}`" for name in names])
    rest = "it is" if len(names) == 1 else f"{shown} are"
    return f"the optimizer does not hold {shown if len(names) == 1 else plural(len(names), 'parameter')}: {rest} never updated"


class Link(IntEnum):
    """The chain from a loss to a changed parameter: the first link that breaks; whatever comes after it has no effect."""

    FROZEN = 0
    WITHOUT_GRADIENT = 1
    ZERO_GRADIENT = 2
    ZERO_RATE = 3
    UNMOVED = 4
    BARELY_MOVED = 5
    NONE = 6

    @property
    def words(self) -> str:
        """Why the parameter does not change, as every instrument says it."""
        return _REASONS[self]


_REASONS = {
    Link.FROZEN: "frozen",
    Link.WITHOUT_GRADIENT: "no gradient",
    Link.ZERO_GRADIENT: "zero gradients",
    Link.ZERO_RATE: "the learning rate is 0",
    Link.UNMOVED: "updates round to zero",
}


def named_in(models: Mapping[str, torch.nn.Module], what: str) -> dict[str, Any]:
    """Parameters, buffers or modules by name, as `what` gives them; of several models, after the name of its own."""
    named = ((model, path, part) for model, module in models.items() for path, part in getattr(module, what)())
    return {path if len(models) == 1 else f"{model}.{path}".rstrip("."): part for model, path, part in named}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """All that an optimizer holds, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True, eq=False)
class ParameterFacts:
    """What is known of one parameter."""

    parameter: torch.Tensor
    group: Mapping[str, Any] | None
    """The group of the optimizer that holds it; None where none does."""
    state: Mapping[str, Any] | None
    """What that optimizer keeps of it; None before the first update."""
    gradient: bool | None
    """Whether any element of its gradient is not zero; None without a gradient."""

    @property
    def rate(self) -> float | None:
        """Its learning rate; None where there is none."""
        return None if self.group is None or "lr" not in self.group else float(self.group["lr"])


def facts_of(
    parameters: Mapping[str, torch.Tensor], optimizers: Sequence[torch.optim.Optimizer], gradients: Mapping[int, torch.Tensor] | None = None
) -> dict[str, ParameterFacts]:
    """The facts of each parameter, by name; `gradients` are those of an earlier moment, by the id of the parameter."""
    groups = {id(tensor): group for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"]}
    states = {id(tensor): state for optimizer in optimizers for tensor, state in optimizer.state.items() if state}
    facts: dict[str, ParameterFacts] = {}
    for name, parameter in parameters.items():
        key, gradient = id(parameter), parameter.grad if gradients is None else gradients.get(id(parameter))
        if gradient is not None:
            gradient = local_of(gradient).detach()
            gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
        facts[name] = ParameterFacts(parameter, groups.get(key), states.get(key), None if gradient is None else bool(gradient.any()))
    return facts


def classes_of(loss: torch.Tensor) -> int | None:
    """C of a cross-entropy over C classes; 2 of a binary one; None for any other loss, and for several that differ."""
    amounts: set[int] = set()
    todo: deque[Any] = deque([loss.grad_fn] if loss.grad_fn is not None else [])
    for _ in range(_MOST_NODES):
        if not todo:
            break
        node = todo.popleft()
        name = node.name()
        if name.startswith(_OF_TWO):
            amounts.add(2)
        elif name.startswith(_OF_MANY):
            scores = node.next_functions[0][0]
            shape = tuple(scores._input_metadata[0].shape) if getattr(scores, "_input_metadata", None) else ()
            amounts.add(int(shape[1 if len(shape) > 1 else 0]) if shape else 0)
        else:
            todo.extend(before for before, _ in node.next_functions if before is not None)
    return (amounts.pop() or None) if len(amounts) == 1 else None


def factor_of(loss: torch.Tensor) -> float:
    """By what a criterion that has a least value is multiplied: -1 for ``-F.mse_loss(...)``; NaN where that is not known."""
    node, factor = loss.grad_fn, 1.0
    for _ in range(_MOST_NODES):
        name = "" if node is None else node.name()
        if "Loss" in name or name.startswith((_OF_TWO, "Abs")) or getattr(node, "_saved_exponent", None) == 2:  # noqa: PLR2004 - a square
            return factor
        if name.startswith(("Mul", "Div")):
            raw: Any = getattr(node, "_raw_saved_other", None)  # to look at what a hook has packed would run the user's code
            scale = None if raw is None or getattr(raw, "unpack_hook", None) is not None else getattr(node, "_saved_other", None)
            if not isinstance(scale, torch.Tensor) or scale.dim() or scale.device.type != "cpu" or not float(scale):
                break
            factor = factor * float(scale) if name.startswith("Mul") else factor / float(scale)
        elif name.startswith("Neg"):
            factor = -factor
        elif not name.startswith(("Mean", "Sum", "View", "Squeeze")):
            break
        assert node is not None
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return math.nan


class ClipCall(NamedTuple):
    """One call of `clip_grad_norm_`."""

    parameters: frozenset[int]
    total: torch.Tensor
    max_norm: float
    line: Line | None


@dataclass(eq=False)
class StepEvents:
    """What happened since the last update of any optimizer: copies of single numbers, and no graph."""

    backward_line: Line | None = None
    factor: float = math.nan
    """By what the criterion of the last loss is multiplied."""
    classes: int | None = None
    """How many classes the last loss chooses from."""
    total: torch.Tensor | None = None
    """The sum of the losses."""
    count: int = 0
    """Backward passes."""
    is_scaled: bool = False
    """Whether the last loss may be multiplied by a GradScaler."""
    leaves: frozenset[int] | None = None
    """The ids of the tensors that the last loss depends on, where that was asked."""
    clips: list[ClipCall] = field(default_factory=list)
    early_clip: Line | None = None
    """Where gradients were clipped before the first backward pass."""
    has_clip: bool = False
    """Whether any were clipped after one."""
    empty_clip: Line | None = None
    """Where the norm of no gradients at all was clipped after one."""
    zeroed: Line | None = None
    """Where gradients were set to zero after the last backward pass."""
    batch: tuple[int, int] | None = None
    """(epoch, batch) of the DataLoader that the last loss was computed from."""


class EventWatch:
    """Follows backward passes, clipping, `zero_grad` and schedulers between the updates of one thread."""

    def __init__(self, hooks: Hooks, guard: Guard) -> None:
        self.now = StepEvents()
        self.lines = Lines(Line)
        self.scheduled: dict[int, tuple[float, Line | None]] = {}
        """The learning rate that a scheduler gave a group last, by the id of the group, and where it was stepped."""
        self.backward_count = self.steps_count = 0
        self.values: list[torch.Tensor] = []
        """Of the first passes and of the last ones, while no optimizer has updated anything."""
        self.wants_leaves = False
        """Whether the next loss is asked for what it depends on."""
        self._hooks, self._guard, self._batches = hooks, guard, _Batches()
        self._thread = threading.get_ident()

    def attach(self, stack: ExitStack) -> None:
        """Follow them until the stack closes."""
        self._thread = threading.get_ident()
        self._hooks.autograd_calls(stack, "backward", self.looking("the look at a loss", self._differentiated))
        self._hooks.clipped_gradients(stack, self.looking("the look at clipping", self._norm_clipped))
        self._hooks.grouped_gradients(stack, self.looking("the look at clipping", self._values_clipped))
        self._hooks.zeroed_gradients(stack, self.looking("the look at zero_grad()", self._zeroed))
        self._hooks.loader_batches(stack, self.looking("counting batches", self._batches.fetched, is_after=True))
        self._hooks.scheduled_values(stack, self.looking("the look at a scheduler", self._scheduled))

    def guarded(self, what: str, look: Callable[..., None]) -> Callable[..., None]:
        """A look that is ours to take, and whose failure is a line of the report."""

        def guarded(*args: Any, **kwargs: Any) -> None:
            # A CUDA graph that is captured: what is ours would become part of it.
            captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
            if threading.get_ident() == self._thread and not captures and not is_being_compiled():
                self._guard.run(what, look, *args, **kwargs)

        return guarded

    def looking(self, what: str, look: Callable[..., None], *, is_after: bool = False) -> Callable[..., Any]:
        """A function of PyTorch's whose arguments are looked at first, or after it has returned."""
        guarded = self.guarded(what, look)

        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if not is_after:
                guarded(*args, **kwargs)
            result = original(*args, **kwargs)
            if is_after:
                guarded(*args, **kwargs)
            return result

        return around

    def take(self) -> StepEvents:
        """The events before an update, which is over; those of the next begin."""
        events = self.now
        self.steps_count, self.values = self.steps_count + 1, []
        events.batch = self._batches.taken()
        self.now = StepEvents(events.backward_line, events.factor, events.classes)
        return events

    def _differentiated(self, tensors: Any, *_: Any, **__: Any) -> None:
        losses, events = list(tensors_in(tensors)), self.now
        if len(losses) != 1 or losses[0].numel() != 1 or is_traced(losses[0]) or losses[0].is_meta:
            return
        with unseen():
            loss = losses[0]
            events.backward_line = self.lines.here(sys._getframe())
            if self.backward_count < _FIRST_LOOKS or self.backward_count % _LOOK_EVERY == 0:
                events.classes, events.factor = classes_of(loss) or events.classes, factor_of(loss)
            if self.wants_leaves:
                events.leaves, self.wants_leaves = frozenset(map(id, leaves_of([loss]))), False
            events.is_scaled = loss.grad_fn is not None and loss.grad_fn.name() == "MulBackward0"
            self.backward_count += 1
            value = local_of(loss).detach()
            if not self.steps_count:
                self.values = [*self.values[:_KEPT_PASSES], *self.values[_KEPT_PASSES:][-_KEPT_PASSES:], value.clone()]
            events.total = value.clone() if events.total is None or events.total.device != value.device else events.total + value
            events.count += 1
            events.zeroed = None
            self._batches.used()

    def _clipped(self) -> None:
        events = self.now
        events.has_clip = events.has_clip or events.count > 0
        events.early_clip = events.early_clip or (None if events.count else self.lines.here(sys._getframe()))

    def _values_clipped(self, *_: Any) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename != torch.nn.utils.clip_grad.__file__:
            frame = frame.f_back
        if frame is not None and frame.f_code.co_name == "clip_grad_value_":  # and not a norm that is only asked for
            self._clipped()

    def _norm_clipped(self, parameters: Any, max_norm: Any, total_norm: Any, *_: Any, **__: Any) -> None:
        if self.now.count and isinstance(parameters, (list, tuple)) and not parameters:
            self.now.empty_clip = self.lines.here(sys._getframe())
            return
        if float(max_norm) < math.inf:  # else the norm is only asked for
            self._clipped()
        is_known = isinstance(total_norm, torch.Tensor) and not is_traced(total_norm) and not is_shard(total_norm)
        if is_known and isinstance(parameters, (list, tuple)):
            call = ClipCall(frozenset(map(id, parameters)), total_norm.detach(), float(max_norm), self.lines.here(sys._getframe()))
            self.now.clips = [*self.now.clips[-_MOST_CLIPS:], call]

    def _zeroed(self, *_: Any, **__: Any) -> None:
        self.now.zeroed = self.lines.here(sys._getframe())

    def _scheduled(self, group: Any, key: str, value: Any) -> None:
        if key == "lr" and isinstance(value, (int, float)):
            self.scheduled[id(group)] = value, self.lines.here(sys._getframe())


class _Batches:
    """Counts the batches of DataLoaders, by the id of what draws their indices."""

    def __init__(self) -> None:
        self._iterator: weakref.ref[Any] | None = None
        self._epochs: dict[int, int] = {}
        self._epoch = self._fetched = 0
        self._is_new = False
        """Whether a batch was fetched since the last step."""
        self._ahead: int | None = None
        """Batches that were fetched before the first loss of the epoch."""

    def fetched(self, iterator: object) -> None:
        """A DataLoader gave its next batch."""
        if self._iterator is None or self._iterator() is not iterator:
            self._iterator = weakref.ref(iterator)
            key = id(getattr(iterator, "_index_sampler", None))
            self._epoch = self._epochs[key] = self._epochs.get(key, -1) + 1
            self._fetched, self._ahead = 0, None
        self._fetched += 1
        self._is_new = True

    def used(self) -> None:
        """A loss was computed."""
        if self._ahead is None:
            self._ahead = max(0, self._fetched - 1)

    def taken(self) -> tuple[int, int] | None:
        """At a step: (epoch, batch) that the last loss was computed from."""
        is_new, self._is_new = self._is_new, False
        return (self._epoch, max(0, self._fetched - 1 - (self._ahead or 0))) if is_new else None


@contextmanager
def unseen() -> Iterator[None]:
    """Where operations are our own: no mode sees them, no graph grows, and no version counter is kept."""
    with modes_aside() if torch._C._len_torch_dispatch_stack() else nullcontext(), torch.inference_mode():
        yield


@dataclass(frozen=True)
class Owner:
    """A module with parameters of its own."""

    model: int
    """The number of the root module, in the order in which they were met; -1 for tensors outside every module."""
    order: int
    """Among the modules of the model."""
    path: str
    kind: str = field(compare=False)
    """The class of the module."""
    kinds: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """The classes of all modules of the model."""


class Owners:
    """Finds modules wherever they are held; keeps none alive."""

    def __init__(self) -> None:
        self._models: list[str] = []
        """What the user calls each root."""
        self._of: dict[int, tuple[weakref.ref[torch.Tensor], Owner]] = {}
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] = []
        self._searches = self._outside = 0

    def of(self, parameters: Iterable[torch.Tensor]) -> list[Owner]:
        """The owner of each, in their order."""
        parameters = list(parameters)
        unknown = {id(parameter) for parameter in parameters if self._known(parameter) is None}
        if unknown and self._searches < _MOST_SEARCHES:
            self._search(unknown)
        for parameter in parameters:
            if self._known(parameter) is None:
                self._outside += 1
                owner = Owner(-1, self._outside, variable_of(parameter) or f"tensor {self._outside}", "Tensor")
                self._of[id(parameter)] = weakref.ref(parameter), owner
        return [self._of[id(parameter)][1] for parameter in parameters]

    def name(self, owner: Owner) -> str:
        """The module's path; where there are several models, after the name of its own."""
        is_alone = len(self._models) <= 1 or owner.model < 0
        return owner.path if is_alone else f"{self._models[owner.model]}.{owner.path}".rstrip(".")

    def scale(self) -> torch.Tensor | None:
        """The factor of the GradScaler that is in use; None where there is none, or more than one."""
        scalers = (reference() for reference in self._scalers)
        scales = [scaler._scale for scaler in scalers if scaler is not None and scaler._enabled]
        return scales[0] if len(scales) == 1 else None

    def _known(self, parameter: torch.Tensor) -> Owner | None:
        reference, owner = self._of.get(id(parameter), (None, None))
        return owner if reference is not None and reference() is parameter else None

    def _search(self, wanted: set[int]) -> None:
        self._searches += 1
        live = live_kinds(torch.nn.Module, torch.amp.GradScaler)
        self._scalers = [weakref.ref(scaler) for scaler in live[torch.amp.GradScaler]]
        modules = [module for module in live[torch.nn.Module] if "_modules" in module.__dict__ and "_parameters" in module.__dict__]
        parts = parts_of(modules)
        for root in {id(root): root for root in (unwrapped(module) for module in modules if id(module) not in parts)}.values():
            # A wrapper such as `DistributedDataParallel` gives its part no other name: its paths begin with ``module.``.
            tables = ((path, module, module.__dict__.get("_parameters", {})) for path, module in root.named_modules())
            named = [(path, module, [tensor for tensor in table.values() if tensor is not None]) for path, module, table in tables]
            if not any(id(parameter) in wanted for _, _, own in named for parameter in own):
                continue
            number, kinds = len(self._models), frozenset(type(module).__name__ for module in root.modules())
            self._models.append(variable_of(root) or type(root).__name__)
            for order, (path, module, own) in enumerate(named):
                for parameter in own:
                    if self._known(parameter) is None:  # a shared parameter belongs to the first
                        self._of[id(parameter)] = weakref.ref(parameter), Owner(number, order, path, type(module).__name__, kinds)
