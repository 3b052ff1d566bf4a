"""Facts of a training that several instruments judge: whose a parameter is, what its optimizer and gradient say, what guessing costs."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdebug_magics.probing.modules import live_kinds, parts_of, unwrapped
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.storages import local_of

_MOST_SEARCHES = 32
"""Each looks at every object of the process; afterwards, parameters of new models are named by their number."""
_MOST_NODES = 48
_OF_TWO = "BinaryCrossEntropy"
_OF_MANY = ("NllLossBackward", "NllLoss2DBackward")


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
    parameters: Mapping[str, torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    gradients: Mapping[int, torch.Tensor] | None = None,
) -> dict[str, ParameterFacts]:
    """The facts of each parameter, by name; `gradients` are those of an earlier moment, by the id of the parameter."""
    groups = {id(one): group for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    states = {id(one): state for optimizer in optimizers for one, state in optimizer.state.items() if state}
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
            other = None if raw is None or getattr(raw, "unpack_hook", None) is not None else getattr(node, "_saved_other", None)
            if not isinstance(other, torch.Tensor) or other.dim() or other.device.type != "cpu" or not float(other):
                break
            factor = factor * float(other) if name.startswith("Mul") else factor / float(other)
        elif name.startswith("Neg"):
            factor = -factor
        elif not name.startswith(("Mean", "Sum", "View", "Squeeze")):
            break
        assert node is not None
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return math.nan


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
            named = [(path, module, [one for one in table.values() if one is not None]) for path, module, table in tables]
            if not any(id(parameter) in wanted for _, _, own in named for parameter in own):
                continue
            number, kinds = len(self._models), frozenset(type(module).__name__ for module in root.modules())
            self._models.append(variable_of(root) or type(root).__name__)
            for order, (path, module, own) in enumerate(named):
                for parameter in own:
                    if self._known(parameter) is None:  # a shared parameter belongs to the first
                        self._of[id(parameter)] = weakref.ref(parameter), Owner(number, order, path, type(module).__name__, kinds)
