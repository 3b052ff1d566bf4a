"""The parts of a model in which its parameters, FLOPs and activations sit: few enough to be seen at a glance."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdebug_magics.instruments.shapes.report import ShapesReport
    from torchdebug_magics.instruments.shapes.table.outline import Node

__all__ = ["largest_parts", "sizes"]

_ENOUGH, _MOST = 8, 20
_LARGE, _SMALL = 0.1, 0.01
"""Shares of the whole: a part that holds less is not taken apart, is not shown."""


def largest_parts(report: ShapesReport, roots: Sequence[Node]) -> list[Node]:
    """Begin with the roots, and take the largest apart for as long as there is room; the others are left out; in the order of the calls."""
    parts = list(roots)
    totals = (report.total_params, report.total_flops, report.activation_bytes)

    def size(node: Node) -> float:
        return max(part / whole if whole else 0.0 for part, whole in zip(sizes(node), totals, strict=True))

    while len(parts) < _ENOUGH:
        apart = [node for node in parts if node.inside and size(node) >= _LARGE]
        if not apart:
            break
        at = parts.index(max(apart, key=size))
        parts[at : at + 1] = parts[at].inside
    shown = sorted((at for at, node in enumerate(parts) if size(node) >= _SMALL), key=lambda at: -size(parts[at]))[:_MOST]
    return [parts[at] for at in sorted(shown)]


def sizes(node: Node) -> tuple[int, int, int]:
    """Parameters, FLOPs, bytes of activations."""
    return node.params, node.flops, node.activation_bytes
