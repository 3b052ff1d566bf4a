"""What objects of any type refer to, as the garbage collector is told."""

from __future__ import annotations

import gc
from types import ModuleType


def referents(*objects: object) -> list[object]:
    """The direct referents of `objects`. Those of a module are its namespace alone.

    `gc.get_referents` also returns what a C module keeps in its state. `_asyncio` keeps a list of freed iterators there, from
    Python 3.12 on: a reference to one frees it a second time, and the list then has no end.
    """
    modules = [one for one in objects if type(one) is ModuleType]
    if not modules:
        return gc.get_referents(*objects)
    others = (one for one in objects if type(one) is not ModuleType)
    return [*gc.get_referents(*others), *map(vars, modules)]
