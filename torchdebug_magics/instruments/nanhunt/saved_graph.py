"""What a finished autograd graph still knows: the numbers that its nodes saved for their derivatives, and where the first bad one is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdebug_magics.probing.graphs import MOST_NODES
from torchdebug_magics.probing.tensors import INF, NAN, is_bad, kind_of

__all__ = ["SavedGraph", "Suspect"]

_RESULTS = ("result", "output")
_OWN = (*_RESULTS, "indices", "logsumexp", "log_sumexp", "philox", "rng", "save_")
"""How the names of saved tensors begin that the op itself made."""
_PUTS_INFINITIES = frozenset({"masked_fill", "masked_scatter", "where", "constant_pad_nd", "copy_slices", "index_put", "fill"})
"""An infinity from these was written down by somebody, or came in by another way."""
_REPEATABLE = frozenset(
    [
        "acos", "asin", "atanh", "div", "erfinv", "exp", "expm1", "lgamma", "log", "log10", "log1p", "log2", "logit", "mul", "reciprocal",
        "rsqrt", "sqrt", "square", "sub",
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Suspect:
    """A bad tensor of the graph with nothing bad known before it."""

    tensor: torch.Tensor
    operands: tuple[torch.Tensor, ...] = ()
    op: str | None = None
    """What made it; None where it came into the graph from outside."""
    is_leaf: bool = False
    """Whether gradients are collected for it, as for a parameter."""
    order: int = field(default=0, compare=False)

    @property
    def rank(self) -> tuple[bool, int]:
        """A NaN before an infinity, which may have done no harm; then the order of the run."""
        return not kind_of(self.tensor) & NAN, self.order


class SavedGraph:
    """Everything upstream of one tensor. Reads, and changes nothing."""

    def __init__(self, sink: torch.Tensor) -> None:
        self.nodes = list(_in_order(sink.grad_fn))
        self._sink = sink
        self.is_freed = False
        """Whether a backward() has dropped what some node saved."""
        self._saved: dict[Any, dict[str, torch.Tensor]] = {}
        for node in self.nodes:
            self._saved[node], freed = _saved(node)
            self.is_freed = self.is_freed or freed
        self._values: dict[tuple[Any, int], torch.Tensor] = {}
        """What left a node by one of its outputs, where anyone kept it."""
        for node, saved in self._saved.items():
            for tensor in saved.values():
                if tensor.grad_fn is not None:
                    self._values.setdefault((tensor.grad_fn, tensor.output_nr), tensor)
            variable = getattr(node, "variable", None)
            if isinstance(variable, torch.Tensor):
                self._values[node, 0] = variable
            elif (node, 0) not in self._values and (again := _again(node, saved)) is not None:
                self._values[node, 0] = again

    @property
    def op_count(self) -> int:
        """How many ops, the leaves not counted."""
        return sum(not hasattr(node, "variable") for node in self.nodes)

    def first_bad(self) -> Suspect | None:
        """Where the bad numbers of the sink come from: back along values that are bad, or that nobody kept, past none that is finite."""
        found: dict[Any, Suspect | None] = {}
        for order, node in enumerate(self.nodes):
            before = [
                suspect
                for maker, number in node.next_functions
                if maker is not None and (suspect := found.get(maker)) and not self._is_finite(maker, number)
            ]
            before += self._entering(node, order)
            found[node] = min(before, key=lambda one: one.rank) if before else self._own(node, order)
        return found.get(self._sink.grad_fn)

    def _is_finite(self, node: Any, number: int) -> bool:
        value = self._values.get((node, number))
        return value is not None and not is_bad(value)

    def _entering(self, node: Any, order: int) -> list[Suspect]:
        """Bad numbers from outside the graph. Nobody differentiates them, so only a node that saved them knows them."""
        return [
            Suspect(tensor, order=order)
            for name, tensor in self._saved[node].items()
            if tensor.grad_fn is None and not tensor.requires_grad and not name.startswith(_OWN) and "mask" not in name and is_bad(tensor)
        ]

    def _own(self, node: Any, order: int) -> Suspect | None:
        bad = next((value for value in self._made(node) if is_bad(value)), None)
        if bad is None:
            return None
        if hasattr(node, "variable"):
            return Suspect(bad, is_leaf=True, order=order)
        name = _op(node.name())
        if name in _PUTS_INFINITIES and kind_of(bad) == INF:
            return None
        operands = tuple(tensor for key, tensor in self._saved[node].items() if not key.startswith((*_OWN, "mask")))
        return Suspect(bad, operands, name, order=order)

    def _made(self, node: Any) -> list[torch.Tensor]:
        outputs = [self._values[node, number] for number in range(len(node._input_metadata)) if (node, number) in self._values]
        return outputs + [tensor for name, tensor in self._saved[node].items() if name.startswith(_RESULTS)]


def _in_order(last: Any) -> Iterator[Any]:
    """Every node upstream, each after all that it takes from; none of a graph with very many, for which there is the trace."""
    todo: list[Any] = [last] if last is not None else []
    entered, done = set[Any](), set[Any]()
    while todo and len(entered) < MOST_NODES:
        node = todo[-1]
        if node not in entered:
            entered.add(node)
            todo += [before for before, _ in reversed(node.next_functions) if before is not None and before not in entered]
            continue
        todo.pop()
        if node not in done:
            done.add(node)
            yield node


def _saved(node: Any) -> tuple[dict[str, torch.Tensor], bool]:
    """What a node saved, by name, and whether any of it was freed. ``saved_tensors`` is what a Function of the user's has."""
    found: dict[str, torch.Tensor] = {}
    freed = False
    for name in dir(node):
        if not name.startswith("_saved_") and name != "saved_tensors":
            continue
        value, lost = _read(node, name)
        freed = freed or lost
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            # A plain number of the formula, such as the inf of `x * inf`, was made by no op.
            if isinstance(tensor, torch.Tensor) and (tensor.dim() or tensor.grad_fn is not None or tensor.requires_grad):
                found.setdefault(name.removeprefix("_saved_"), tensor)
    return found, freed


def _read(node: Any, name: str) -> tuple[Any, bool]:
    try:
        return getattr(node, name), False
    except RuntimeError as error:  # freed, or overwritten since
        return None, "freed" in str(error)


def _again(node: Any, saved: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The result of a simple op, computed once more from finite inputs that its node saved; None where it did not save them all."""
    name = _op(node.name())
    inputs = [saved[key] for key in ("self", "other") if key in saved]
    if name not in _REPEATABLE or not inputs or any(is_bad(one) for one in inputs):
        return None
    try:
        with torch.no_grad():
            result = getattr(torch, name)(*inputs)
    except (TypeError, RuntimeError):
        return None
    return result if isinstance(result, torch.Tensor) else None


def _op(node: str) -> str:
    """``LogSoftmaxBackward0`` -> ``_log_softmax``: the ATen op behind a node's name, as far as ATen has one of a like name."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", re.sub(r"Backward\d*$", "", node)).lower()
    for name in (f"_{words}", f"{words}_forward", words):
        if hasattr(torch.ops.aten, name):
            return name
    return words
