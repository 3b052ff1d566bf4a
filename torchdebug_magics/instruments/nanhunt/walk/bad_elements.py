"""Where tensors are bad, worked out once a walk: neighbouring ops ask about the same tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchdebug_magics.probing.tensors import INF, NAN, bad_mask, dense

__all__ = ["Masks", "Where"]


@dataclass(frozen=True)
class Where:
    """The elements of one kind in one tensor."""

    mask: torch.Tensor | None
    """None where the tensor's own indices are not those of its numbers (sparse, nested)."""
    some: bool
    everywhere: bool


class Masks:
    """A cache of `Where`s; it keeps the tensors it was asked about, so that no id is used twice."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[torch.Tensor, Where]] = {}
        self._full: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor, kind: int) -> Where:
        """Where a tensor holds a value of one kind."""
        key = id(tensor), kind
        if key not in self._known:
            self._known[key] = tensor, _where(tensor, kind)
            where = self._known[key][1]
            if where.mask is not None and where.everywhere:
                self._full[id(where.mask)] = where.mask
        return self._known[key][1]

    def is_full(self, mask: torch.Tensor) -> bool:
        """Whether every element is marked; known without looking where all of a tensor is bad, as most are after a birth."""
        return id(mask) in self._full or bool(mask.all())

    def choose(self, tensor: torch.Tensor, mask: torch.Tensor | None, kinds: int) -> tuple[int, torch.Tensor | None]:
        """The kind to follow, NaN before infinity, and the elements of `mask` that are of it."""
        for kind in (NAN, INF):
            where = self.of(tensor, kind) if kinds & kind else None
            if where is None or not where.some:
                continue
            if where.mask is None or mask is None or mask.shape != where.mask.shape:
                return kind, where.mask
            if where.everywhere:
                return kind, mask
            both = where.mask & mask
            if bool(both.any()):
                return kind, both
        return 0, None


def _where(tensor: torch.Tensor, kind: int) -> Where:
    mask = bad_mask(tensor, kind)
    if mask is None:
        numbers = dense(tensor)
        test = torch.isnan if kind == NAN else torch.isinf
        return Where(None, some=numbers is not None and bool(test(numbers).any()), everywhere=False)
    some = bool(mask.any())
    return Where(mask, some=some, everywhere=some and bool(mask.all()))
