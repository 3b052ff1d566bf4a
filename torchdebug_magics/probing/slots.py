"""Places that may be written, each with what must be kept to write it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CellType
from typing import Any

import torch

from torchdebug_magics.probing.contents import Contents
from torchdebug_magics.probing.kinds import GONE

__all__ = ["PythonState", "Slot", "cell_slot", "class_slot", "contents_slot", "item_slot", "numbers_slot"]

_MOST_NUMBERS = 1 << 24
_ABSENT = object()


@dataclass(frozen=True)
class Slot:
    """One place that may be written: `read` gives what must be kept to `write` it back."""

    read: Callable[[bool], Any]
    """Asked whether to keep alive what is kept."""
    write: Callable[[Any], None]


class PythonState:
    """What a list of slots held at one moment. `alive` is for a short while, see `Contents`."""

    def __init__(self, slots: Iterable[Slot], *, alive: bool = False) -> None:
        self._held = [(slot, slot.read(alive)) for slot in slots]

    @property
    def slots(self) -> list[Slot]:
        """All that `put_back` writes, to take its present state: the places, and the objects that stood in them."""
        objects = [thing for _, kept in self._held if isinstance(kept, Contents) for thing in kept.objects()]
        return [*(slot for slot, _ in self._held), contents_slot(lambda: objects)]

    def put_back(self) -> None:
        """Write every slot as it was; one that cannot be written is left."""
        for slot, value in self._held:
            slot.write(value)


def item_slot(names: dict[str, Any], name: str, *, most: int) -> Slot:
    """A name in a namespace, and what its object holds."""

    def write(kept: Contents | None) -> None:
        if kept is None:
            names.pop(name, None)
            return
        (value,) = kept.put_back(names.get(name))
        if value is not GONE and names.get(name, _ABSENT) is not value:
            names[name] = value

    return Slot(lambda alive: Contents([names[name]], alive=alive, most=most) if name in names else None, write)


def cell_slot(cell: CellType, *, most: int) -> Slot:
    """A variable that functions share, and what its object holds."""

    def read(alive: bool) -> Contents | None:
        held = _content(cell)
        return None if held is _ABSENT else Contents([held], alive=alive, most=most)

    def write(kept: Contents | None) -> None:
        if kept is not None:
            (value,) = kept.put_back(_content(cell))
            if value is not GONE:
                cell.cell_contents = value

    return Slot(read, write)


def class_slot(owner: type, name: str, *, most: int) -> Slot:
    """An attribute of a class, and what its object holds."""

    def write(kept: Contents) -> None:
        present = vars(owner).get(name)
        (value,) = kept.put_back(present)
        if value is not GONE and value is not present:
            type.__setattr__(owner, name, value)

    return Slot(lambda alive: Contents([vars(owner).get(name)], alive=alive, most=most), write)


def contents_slot(objects: Callable[[], Iterable[object]], *, most: int | None = None) -> Slot:
    """What some objects hold, wherever they stand."""
    bound = {} if most is None else {"most": most}
    return Slot(lambda alive: Contents(objects(), alive=alive, **bound), lambda kept: _ignore(kept.put_back(*objects())))


def numbers_slot(value: Any) -> Slot | None:
    """The numbers of a plain tensor or array that a statement names, and so may write in place."""
    kind = type(value)
    if kind is torch.Tensor and value.is_leaf and not value.requires_grad and value.layout is torch.strided and not value.is_meta:
        return _tensor_slot(value) if value.numel() <= _MOST_NUMBERS and not value.is_nested and not value.is_inference() else None
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray" and value.size <= _MOST_NUMBERS and value.flags.writeable:
        return Slot(lambda _alive: value.copy(), lambda copy: value.__setitem__(..., copy))
    return None


def _tensor_slot(tensor: torch.Tensor) -> Slot:
    def write(held: tuple[int, torch.Tensor]) -> None:
        version, copy = held
        if tensor._version != version:
            with torch.no_grad():
                tensor.copy_(copy)

    return Slot(lambda _alive: (tensor._version, tensor.detach().clone()), write)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _ignore(_result: object) -> None:
    """For a function that returns something."""
