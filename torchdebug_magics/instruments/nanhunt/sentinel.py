"""All that runs until something is wrong: one reduction over the loss and the gradients, with one synchronisation."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.probing.tensors import dense, extremes, largest, peak_of

__all__ = ["Leaves", "leaves_of", "survey"]


def survey(loss: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]) -> tuple[float, float]:
    """The loss (of several elements: the largest magnitude) and the largest magnitude of it and all gradients."""
    with _unseen():
        losses = [numbers for numbers in map(dense, loss) if numbers is not None]
        if len(losses) != 1 or losses[0].numel() != 1 or losses[0].is_complex():
            value = largest(losses)
            return value, _peak(value, largest(gradients))
        single, found = losses[0].reshape(()), extremes(gradients)
        if single.is_cpu and all(one.is_cpu for one in found):
            value = single.item()
            return value, _peak(abs(value), *(abs(one.item()) for one in found))
        if all(one.device == single.device for one in found):
            # One transfer for everything: the signed loss rides along.
            value, *values = torch.stack([single.double(), *(one.double() for one in found)]).tolist()
            return value, _peak(abs(value), *map(abs, values))
        value = single.item()
        return value, _peak(abs(value), peak_of(found))


def _peak(*values: float) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)


@contextlib.contextmanager
def _unseen() -> Any:
    """Our reductions are not shown to a dispatch mode of the user's."""
    if torch._C._len_torch_dispatch_stack():
        with _disable_current_modes(), torch.no_grad():
            yield
    else:
        with torch.no_grad():
            yield


class Leaves:
    """The leaf tensors a backward() gives gradients to. The graph is walked once for each place that calls it."""

    def __init__(self) -> None:
        self._sites: dict[Hashable, list[weakref.ref[torch.Tensor]]] = {}

    def of(self, site: Hashable, roots: tuple[torch.Tensor, ...], parameters: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Those of the graph, and `parameters`: a graph may differ from step to step."""
        known = self._sites.get(site)
        alive = [leaf for reference in known or () if (leaf := reference()) is not None]
        if known is None or len(alive) < len(known):
            alive = leaves_of(roots)
            self._sites[site] = [weakref.ref(leaf) for leaf in alive]
        return {**parameters, **{id(leaf): leaf for leaf in alive}}


def leaves_of(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Every leaf tensor that the graph of `roots` ends in."""
    todo: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    found: dict[int, torch.Tensor] = {id(root): root for root in roots if root.is_leaf and root.requires_grad}
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found[id(variable)] = variable
        todo += [following for following, _ in node.next_functions if following is not None]
    return list(found.values())
