"""What the user's names lead to that draws random numbers: generators, and the loaders that hand seeds to their workers."""

from __future__ import annotations

from types import FrameType
from typing import NamedTuple

from torch.utils.data import DataLoader

from torchdebug_magics.instruments.deterministic.ritual.generators import is_shared
from torchdebug_magics.probing.names import Named, user_names, values_found
from torchdebug_magics.probing.states import is_generator

__all__ = ["Sources"]


class Sources(NamedTuple):
    """Each once, by its shortest name."""

    generators: tuple[Named, ...]
    loaders: tuple[Named, ...]

    @classmethod
    def found_from(cls, frame: FrameType | None) -> Sources:
        """From the notebook's or script's names, and from those of the calls that `frame` stands in."""
        found = values_found(user_names(frame), lambda value: is_generator(value) or _is_loader(value))
        loaders = tuple(one for one in found if _is_loader(one.value))
        return cls(tuple(one for one in found if is_generator(one.value) and not is_shared(one.value)), loaders)


def _is_loader(value: object) -> bool:
    return issubclass(type(value), DataLoader)
