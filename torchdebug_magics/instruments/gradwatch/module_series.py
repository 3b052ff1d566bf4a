"""What is kept of each module over the steps: bins of bounded number, the last steps, and a few facts about all of them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from torchdebug_magics.instruments.gradwatch.step_history import StepHistory
from torchdebug_magics.probing.modules import live_kinds, parts_of, unwrapped
from torchdebug_magics.probing.names import variable_of

BINS = 256
FAST, FIRST_STEPS = 0.1, 2
"""An update of more than this share of the weights is too large, but in the first steps."""
_RECENT = 64
_MOST_SEARCHES = 32
"""Each looks at every object of the process; afterwards, parameters of new models are named by their number."""
_KINDS = (torch.nn.Module, torch.amp.GradScaler)


class Bins:
    """Values by step, of which each bin keeps one; NaN is kept wherever it occurs."""

    def __init__(self, keep: Callable[[float, float], float]) -> None:
        self._keep = keep
        self.values: list[float | None] = []

    def add(self, place: int, value: float) -> None:
        """Into the bin at `place`, which is never before the last one by more than the present step."""
        values = self.values
        if place == len(values):
            values.append(value)
            return
        values += [None] * (place + 1 - len(values))
        values[place] = self._both(values[place], value)

    def halve(self) -> None:
        """Two bins become one."""
        padded = [*self.values, None] if len(self.values) % 2 else self.values
        self.values = [self._both(a, b) for a, b in zip(padded[::2], padded[1::2], strict=True)]

    def _both(self, first: float | None, second: float | None) -> float | None:
        if first is None or second is None:
            return second if first is None else first
        return self._keep(first, second) if first == first else first  # noqa: PLR0124 - NaN


@dataclass(eq=False)
class ModuleSeries:
    """One module. A step may come in parts, where several optimizers hold its parameters."""

    owner: Owner
    count: int = 0
    """Of its parameters' elements."""
    histories: list[StepHistory] = field(default_factory=list)
    """Of the optimizers that update it."""
    parameters: set[int] = field(default_factory=set)
    """Their ids."""
    is_matrix: bool = False
    """Whether one of those that train has two dimensions or more."""
    is_sharded: bool = False
    """Whether other ranks hold parts of them: of those nothing is known here."""
    is_half: bool = False
    """Whether they are of 16 bits."""
    norms: Bins = field(default_factory=lambda: Bins(max))
    ratios: Bins = field(default_factory=lambda: Bins(max))
    zeros: Bins = field(default_factory=lambda: Bins(min))
    recent_norms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    recent_ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    steps_count: int = 0
    first_step: int = 0
    zero_run: int = 0
    """How many of the last steps had a gradient of zeros only."""
    zero_since: int = 0
    unmoved_run: int = 0
    """How many of the last samples changed no weight although there was a gradient and a learning rate."""
    is_used: bool | None = None
    """Whether the loss depends on it, as its graph says; None where that was not asked."""
    ratio_max: float = 0.0
    norm_max: float = 0.0
    zero_share: float = 0.0
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Of the steps, but the first few, whose update was as large as the weights."""


@dataclass(eq=False)
class Grid:
    """All modules, and the losses and total norms, in bins of the same width."""

    width: int = 1
    series: dict[tuple[int, str], ModuleSeries] = field(default_factory=dict)
    losses: Bins = field(default_factory=lambda: Bins(lambda _, later: later))
    totals: Bins = field(default_factory=lambda: Bins(max))

    def place(self, step: int) -> int:
        """The bin of a step; the bins are made wider where it would be one too many."""
        while step // self.width >= BINS:
            self.width *= 2
            for bins in (self.losses, self.totals):
                bins.halve()
            for one in self.series.values():
                for bins in (one.norms, one.ratios, one.zeros):
                    bins.halve()
        return step // self.width

    def ordered(self) -> list[ModuleSeries]:
        """In the order of the models; what never had a gradient is left out."""
        return sorted((one for one in self.series.values() if one.steps_count), key=lambda one: (one.owner.model, one.owner.order))


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
        self.models: list[str] = []
        """What the user calls each root."""
        self._of: dict[int, tuple[weakref.ref[torch.Tensor], Owner]] = {}
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] = []
        self._searches = 0
        self._outside = 0

    def of(self, parameters: Iterable[torch.Tensor]) -> list[Owner]:
        """The owner of each, in their order."""
        parameters = list(parameters)
        if any(self._known(one) is None for one in parameters) and self._searches < _MOST_SEARCHES:
            self._search({id(one) for one in parameters if self._known(one) is None})
        return [self._known(one) or self._named_itself(one) for one in parameters]

    def scale(self) -> torch.Tensor | None:
        """The factor of the GradScaler that is in use; None where there is none, or more than one."""
        scales = [one._scale for ref in self._scalers if (one := ref()) is not None and one._enabled]
        return scales[0] if len(scales) == 1 else None

    def _known(self, parameter: torch.Tensor) -> Owner | None:
        ref, owner = self._of.get(id(parameter), (None, None))
        return owner if ref is not None and ref() is parameter else None

    def _search(self, wanted: set[int]) -> None:
        self._searches += 1
        found = live_kinds(*_KINDS)
        self._scalers = [weakref.ref(one) for one in found[torch.amp.GradScaler]]
        modules = [one for one in found[torch.nn.Module] if "_modules" in one.__dict__ and "_parameters" in one.__dict__]
        parts = parts_of(modules)
        roots = {id(root): root for root in (unwrapped(one) for one in modules if id(one) not in parts)}
        for root in roots.values():
            self._read(root, wanted)

    def _read(self, root: torch.nn.Module, wanted: set[int]) -> None:
        """A wrapper such as `DistributedDataParallel` gives its part no other name: its paths begin with ``module.``."""
        named = [(path, module) for path, module in root.named_modules() if wanted & {id(one) for one in _own(module)}]
        if not named:
            return
        number, kinds = len(self.models), frozenset(type(module).__name__ for module in root.modules())
        self.models.append(variable_of(root) or type(root).__name__)
        for order, (path, module) in enumerate(root.named_modules()):
            owner = Owner(number, order, path, type(module).__name__, kinds)
            for parameter in _own(module):
                if self._known(parameter) is None:  # one that is shared belongs to the first
                    self._of[id(parameter)] = (weakref.ref(parameter), owner)

    def _named_itself(self, parameter: torch.Tensor) -> Owner:
        self._outside += 1
        owner = Owner(-1, self._outside, variable_of(parameter) or f"tensor {self._outside}", "Tensor")
        self._of[id(parameter)] = (weakref.ref(parameter), owner)
        return owner


def _own(module: torch.nn.Module) -> list[torch.Tensor]:
    return [one for one in module.__dict__.get("_parameters", {}).values() if one is not None]
