"""The tensors that a run leaves in its names: they may differ though every op agrees, where they were made out of sight."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from torchdebug_magics.instruments.deterministic.ops.digest import of_tensor
from torchdebug_magics.instruments.deterministic.origin.lines.digests import Digests
from torchdebug_magics.instruments.deterministic.report import Divergence
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.twice.body import Body
    from torchdebug_magics.report import Location

__all__ = ["different", "plain_results_of", "results_of", "tensors_left"]

_FLAT = frozenset({int, float, bool, str})
_MOST = 64
"""Members of a list or a dict that are looked at."""


def results_of(body: Body, is_unwritten: Callable[[torch.Tensor], bool]) -> dict[str, int]:
    """A digest of each tensor that a name of the user's leads to; memory that nobody has written has none."""
    return {name: of_tensor(tensor) for name, tensor in tensors_left(body) if not is_lazy(tensor) and not is_unwritten(tensor)}


def plain_results_of(body: Body) -> dict[str, int]:
    """A digest of each number, text and flat list that a name of the user's holds."""
    return {name: Digests().of(value) for name, value in body.left().items() if not name.startswith("_") and _is_plain(value)}


def _is_plain(value: object) -> bool:
    if type(value) in {list, tuple}:
        return all(type(one) in _FLAT for one in list(value)[:_MOST])  # type: ignore[call-overload]  # a list or a tuple, as was asked
    return type(value) in _FLAT


def tensors_left(body: Body) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor that a name of the user's leads to, after a run."""
    return (one for name, value in body.left().items() for one in _tensors(name, value))


def different(first: Mapping[str, int], second: Mapping[str, int], body: Body) -> Divergence | None:
    """The first tensor that is another one after the second run."""
    name = next((name for name, digest in first.items() if second.get(name, digest) != digest), None)
    if name is None:
        return None
    return Divergence(
        op="",
        module=None,
        location=_bound_at(body, name),
        occurrence=1,
        cause="outside_data",
        explanation=f"`{name}` differs although all recorded ops agree: it was computed unseen, in a thread or in compiled code",
        fix="",
    )


def _tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, torch.nn.Module):
        yield from ((f"{name}.{path}", one) for part in (value.named_parameters(), value.named_buffers()) for path, one in part)
    elif type(value) in {list, tuple}:
        members: list[object] = list(value)[:_MOST]  # type: ignore[call-overload]  # a list or a tuple, as was asked
        yield from ((f"{name}[{place}]", one) for place, one in enumerate(members) if isinstance(one, torch.Tensor))
    elif isinstance(value, dict):
        named = list(value.items())[:_MOST]
        yield from ((f"{name}[{key!r}]", one) for key, one in named if isinstance(key, (str, int)) and isinstance(one, torch.Tensor))


def _bound_at(body: Body, name: str) -> Location | None:
    """The last line of the body that names the variable."""
    root = name.partition(".")[0].partition("[")[0]
    named = (node for one in body.statements for node in ast.walk(one) if isinstance(node, ast.Name) and node.id == root)
    lines = [node.lineno for node in named if isinstance(node.ctx, ast.Store)]
    return location(body.file, max(lines), "<module>") if lines else None
