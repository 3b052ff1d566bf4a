"""The graph node whose saved tensor can no longer be used: asked from the nodes themselves, without running them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from torchdebug_magics.probing.graphs import upstream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

__all__ = ["Broken", "Complaint", "broken_nodes", "is_packed", "nodes_of", "saved_names"]

_CHANGED = "modified by an inplace operation"
_MESSAGE = re.compile(r"\[[\w.]+ \[([\d, ]*)\]\](?:, which is output \d+ of (\S+?),)? is at version (\d+); expected version (\d+)")


class Complaint(NamedTuple):
    """What PyTorch says of a tensor that was modified in place."""

    shape: tuple[int, ...]
    maker: str
    """The node that made it, such as ``"ExpBackward0"``; empty for a leaf."""
    version: int
    expected: int

    @classmethod
    def of(cls, message: str) -> Complaint | None:
        """None where the message holds no such thing."""
        found = _MESSAGE.search(message)
        if found is None:
            return None
        shape = tuple(int(size) for size in found[1].split(",") if size.strip())
        return cls(shape, found[2] or "", int(found[3]), int(found[4]))


class Broken(NamedTuple):
    """A node, and which of its saved tensors was modified."""

    node: Any
    attribute: str
    complaint: Complaint | None


def nodes_of(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes of their graphs; see `upstream` for how many."""
    return upstream(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)


def broken_nodes(tensors: Iterable[torch.Tensor]) -> Iterator[Broken]:
    """The nodes that hold a tensor which was modified after it was saved."""
    for node in nodes_of(tensors):
        for name in saved_names(node):
            if _CHANGED in (refused := _refused(node, name)):
                yield Broken(node, name, Complaint.of(refused))


def saved_names(node: Any) -> tuple[str, ...]:
    """The attributes under which a node hands out what it saved."""
    names = dir(type(node))
    tensors = [name.removeprefix("_raw") for name in names if name.startswith("_raw_saved_") and name.removeprefix("_raw") in names]
    return (*tensors, *(["saved_tensors"] if "saved_tensors" in names else []))


def is_packed(node: Any, name: str) -> bool:
    """Whether a hook has packed it, so that a look at it would run the user's code, as a checkpoint's forward."""
    try:
        raw = getattr(node, f"_raw{name}" if name.startswith("_saved") else f"_raw_{name}")
    except (AttributeError, RuntimeError):
        return False
    return any(getattr(one, "unpack_hook", None) is not None for one in (raw if isinstance(raw, (tuple, list)) else (raw,)))


def _refused(node: Any, name: str) -> str:
    if is_packed(node, name):
        return ""
    try:
        getattr(node, name)
    except RuntimeError as error:
        return str(error)
    return ""
