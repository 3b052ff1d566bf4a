"""The tables of rotary positions: how fast each pair of features turns, and the angles, cosines and sines at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["rotations"]

_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda angles: angles,
    ".repeat(1, 2)": lambda angles: angles.repeat(1, 2),
    ".repeat_interleave(2, 1)": lambda angles: angles.repeat_interleave(2, 1),
}
"""One number a pair, or one a feature: the halves side by side, or the two of each pair."""
_READ: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"cos": torch.acos, "sin": torch.asin}
_SLOWEST = 1000
"""The least base: of smaller ones it is not known whether they go with the width."""
_NEAR = 1e-2
"""Of cosines at far steps in single precision."""


def rotations(table: torch.Tensor, got: int, wanted: int) -> tuple[str, Callable[[], torch.Tensor]] | None:
    """(what to type, the same thing done) for as many features, or steps; None where the numbers are others."""
    if not (table.is_floating_point() or table.is_complex()):
        return None
    steps, width = (1, *table.shape)[-2:]
    if steps == 1:
        return _speeds(table, got, wanted)
    by_step = steps == got
    new = (wanted, width) if by_step else (steps, width * wanted // got)
    flat = table.view(steps, width)
    for layout, lay in _LAYOUTS.items():
        pairs = width // 2 if layout else width
        for name in ("polar",) if table.is_complex() else _READ:
            first = flat[1].angle() if name == "polar" else _READ[name](flat[1].clamp(-1, 1))
            base = _base(first[::2] if "interleave" in layout else first[:pairs])
            if base and (name != "polar" or not layout) and _is_near(_table(name, lay, steps, pairs, base), flat):
                many, new_pairs = new[0], new[1] // 2 if layout else new[1]
                sizes = tuple(table.shape[:-2]) + new
                code = _code(name, layout, many, new_pairs, base) + (f".view{sizes}" if table.dim() != flat.dim() else "")
                return code, _maker(name, lay, many, new_pairs, base, table.dtype, sizes)
    return None


def _maker(
    name: str, lay: Callable[[torch.Tensor], torch.Tensor], many: int, pairs: int, base: float, dtype: torch.dtype, sizes: tuple[int, ...]
) -> Callable[[], torch.Tensor]:
    return lambda: _table(name, lay, many, pairs, base).to(dtype).view(sizes)


def _speeds(table: torch.Tensor, got: int, wanted: int) -> tuple[str, Callable[[], torch.Tensor]] | None:
    flat = table.flatten()
    pairs = len(flat) * wanted // got
    base = _base(flat) if not table.is_complex() and pairs else 0
    if not base or len(flat) * wanted % got or not _is_near(_turns(len(flat), base), flat):
        return None
    sizes = (*table.shape[:-1], pairs)
    return _turns_code(pairs, base), lambda: _turns(pairs, base).to(table.dtype).view(sizes)


def _base(speeds: torch.Tensor) -> float:
    """Of the powers by which each pair turns slower than the one before it; 0 where they are none."""
    many = len(speeds)
    if many < 2 or not 0 < float(speeds[1]) < 1 or abs(float(speeds[0]) - 1) > _NEAR:
        return 0.0
    base = float(speeds[1].double()) ** -many
    rounded = float(f"{base:.2g}")
    return 0.0 if base < _SLOWEST else rounded if abs(rounded - base) < _NEAR * base else base


def _turns(pairs: int, base: float) -> torch.Tensor:
    return base ** -(torch.arange(0, 2 * pairs, 2) / (2 * pairs))


def _turns_code(pairs: int, base: float) -> str:
    return f"{base:g} ** -(torch.arange(0, {2 * pairs}, 2) / {2 * pairs})"


def _table(name: str, lay: Callable[[torch.Tensor], torch.Tensor], steps: int, pairs: int, base: float) -> torch.Tensor:
    angles = torch.arange(steps)[:, None] * _turns(pairs, base)
    return torch.polar(torch.ones_like(angles), angles) if name == "polar" else getattr(lay(angles), name)()


def _code(name: str, layout: str, steps: int, pairs: int, base: float) -> str:
    angles = f"torch.arange({steps})[:, None] * {_turns_code(pairs, base)}"
    return f"torch.polar(torch.ones({steps}, {pairs}), {angles})" if name == "polar" else f"({angles}){layout}.{name}()"


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(((one - other).abs() < _NEAR).all())
