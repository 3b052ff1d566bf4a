"""What is noted of the recorded steps, at each backward pass and each update; tensors are held weakly."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.instruments.autograd.silences.named import variable_of
from torchdebug_magics.instruments.autograd.silences.stale_values import StaleValue, stale_value
from torchdebug_magics.probing.modules import fast_path_parts, is_compiled, unwrapped

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.course import Backward
    from torchdebug_magics.instruments.autograd.recording.recorder import Recorder
    from torchdebug_magics.instruments.autograd.recording.tape import Tape

__all__ = ["BackwardSeen", "StepSeen", "Watched"]


@dataclass
class BackwardSeen:
    """One backward pass of the recorded steps."""

    event: Backward
    leaves: list[weakref.ref[torch.Tensor]]
    """What its gradients arrive at."""
    loss_is_leaf: bool
    op_index: int | None
    """The op that made the loss."""
    loss_tensor: int
    loss_memory: int
    left_over: frozenset[int] = frozenset()
    """Ids of the optimizers that have stepped, and whose tensors still had gradients other than zero."""
    reached: frozenset[int] = frozenset()
    """Ids of the optimizers of which it reaches a tensor."""


@dataclass
class StepSeen:
    """One update of the recorded steps."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    key: int
    place: int
    """How many events were before it."""
    without: list[weakref.ref[torch.Tensor]]
    """Tensors that require a gradient and have none."""
    with_gradient: int
    """How many have one that is not all zero."""
    zero_count: int
    """How many have one that is all zero."""
    name: str
    """The variable that holds the optimizer where it is stepped."""


@dataclass
class Watched:
    """The recorded steps."""

    recorder: Recorder
    backwards: list[BackwardSeen] = field(default_factory=list)
    steps: list[StepSeen] = field(default_factory=list)
    stale: list[StaleValue] = field(default_factory=list)
    order: list[BackwardSeen | StepSeen] = field(default_factory=list)
    _stepped: dict[int, weakref.ref[torch.optim.Optimizer]] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)

    def trained_with_modes(self) -> list[torch.nn.Module]:
        """The models with BatchNorm or Dropout that an optimizer updates, and that no compiler or fused kernel runs."""
        updated = {id(one) for ref in self._stepped.values() if (optimizer := ref()) is not None for one in _tensors(optimizer)}
        roots = {id(root): root for seen in self.recorder.root_calls.values() if seen.modes and (root := seen.root()) is not None}
        found = [root for root in roots.values() if any(id(one) in updated for one in root.parameters())]
        return [root for root in found if not is_compiled(root) and unwrapped(root) is root and not fast_path_parts([root])]

    def steps_of(self, optimizer: torch.optim.Optimizer) -> int:
        """How often it was stepped while recorded."""
        return self._counts.get(id(optimizer), 0)

    def written_by_hand(self, tape: Tape) -> frozenset[int]:
        """Storages that the user's code writes once the first backward pass has begun: no initialization, and no optimizer's update."""
        first = self.backwards[0].event.index if self.backwards else 0
        return frozenset(use.memory for op in tape.since(first) if not op.in_optimizer and not op.in_backward for use in op.writes)

    def before_backward(self, event: Backward, tensors: tuple[torch.Tensor, ...], nodes: list[Any]) -> None:
        """What the pass will reach, and which gradients are there already."""
        with _disable_current_modes(), torch.no_grad():
            leaves = [node.variable for node in nodes if hasattr(node, "variable")]
            ids = {id(leaf) for leaf in leaves}
            alive = {key: one for key, ref in self._stepped.items() if (one := ref()) is not None}
            reached = {key for key, one in alive.items() if any(id(tensor) in ids for tensor in _tensors(one))}
            left = {key for key in reached if any(_is_nonzero(tensor.grad) for tensor in _tensors(alive[key]) if id(tensor) in ids)}
            loss = tensors[0] if tensors else None
            use = self.recorder.use(loss) if loss is not None else None
            seen = BackwardSeen(
                event,
                [weakref.ref(leaf) for leaf in leaves],
                loss is not None and loss.is_leaf and loss.requires_grad,
                None,
                id(loss) if loss is not None else 0,
                use.memory if use is not None else 0,
                frozenset(left),
                frozenset(reached),
            )
            self.backwards.append(seen)
            self.order.append(seen)
        if not self.stale and (found := stale_value(self.recorder, tensors, nodes)) is not None:
            self.stale.append(found)

    def before_step(self, optimizer: torch.optim.Optimizer, *, is_recorded: bool) -> None:
        """Which of its tensors have a gradient."""
        self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        if not is_recorded:
            return
        with _disable_current_modes(), torch.no_grad():
            tensors = [one for one in _tensors(optimizer) if one.requires_grad]
            nonzero = [one for one in tensors if one.grad is not None and _is_nonzero(one.grad)]
            seen = StepSeen(
                weakref.ref(optimizer),
                id(optimizer),
                len(self.order),
                [weakref.ref(one) for one in tensors if one.grad is None],
                len(nonzero),
                sum(one.grad is not None for one in tensors) - len(nonzero),
                variable_of(optimizer) or "optimizer",
            )
        self._stepped[id(optimizer)] = seen.optimizer
        self.steps.append(seen)
        self.order.append(seen)


def _tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _is_nonzero(gradient: torch.Tensor | None) -> bool:
    if gradient is None or gradient.is_meta:
        return False
    values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
    return bool(values.count_nonzero())
