"""Tables that are known by their numbers, such as a causal mask or a window, and how to write a larger one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.shapes.repair.rotations import rotations

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Known", "resized"]


@dataclass(frozen=True, eq=False)
class Known:
    """A table of other sizes: what to type, and the same thing done."""

    code: str
    make: Callable[[], torch.Tensor]


_SQUARES: dict[str, Callable[[int], torch.Tensor]] = {
    "torch.tril(torch.ones({0}, {0}))": lambda many: torch.ones(many, many).tril(),
    "torch.triu(torch.ones({0}, {0}), diagonal=1)": lambda many: torch.ones(many, many).triu(1),
    "torch.full(({0}, {0}), float('-inf')).triu(1)": lambda many: torch.full((many, many), float("-inf")).triu(1),
}
_ROWS: dict[str, Callable[[int], torch.Tensor]] = {
    "torch.arange({0})": torch.arange,
    "torch.hann_window({0})": torch.hann_window,
    "torch.hamming_window({0})": torch.hamming_window,
}
_CASTS = {torch.bool: "bool", torch.int64: "long", torch.uint8: "byte", torch.float32: "float", torch.float16: "half"}
_LARGEST = 1 << 24
"""Elements."""


def resized(table: torch.Tensor, got: int, wanted: int) -> Known | None:
    """The table in which what is `got` large is as large as `wanted`; None where its numbers are not known."""
    if table.numel() > _LARGEST or table.is_meta:
        return None
    whole = table.detach().cpu()
    rows, width = (1, 1, *whole.shape)[-2:]
    if any(size != 1 for size in whole.shape[:-2]):
        return None
    if rows == width == got:
        return _of_kind(_SQUARES, whole, got, wanted)
    if width == got and (found := _of_kind(_ROWS, whole, got, wanted)):
        return found
    turned = rotations(whole, got, wanted)
    return Known(*turned) if turned is not None else None


def _of_kind(kinds: dict[str, Callable[[int], torch.Tensor]], table: torch.Tensor, got: int, wanted: int) -> Known | None:
    for code, make in kinds.items():
        one = make(got)
        if one.numel() == table.numel() and torch.equal(one.to(table.dtype).view(table.shape), table):
            sizes = tuple(wanted if size == got else size for size in table.shape)
            cast = f".{_CASTS[table.dtype]}()" if one.dtype != table.dtype and table.dtype in _CASTS else ""
            view = f".view{sizes}" if table.dim() != one.dim() else ""
            return Known(f"{code.format(wanted)}{cast}{view}", _maker(make, wanted, table.dtype, sizes))
    return None


def _maker(make: Callable[[int], torch.Tensor], many: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    return lambda: make(many).to(dtype).view(sizes)
