"""Tensors from before a replay that it writes in place: copied just before the first write, and written back."""

from __future__ import annotations

from typing import Any

from torchdebug_magics.probing.contents import Contents, memory_of
from torchdebug_magics.probing.dispatch import OpListener, Run
from torchdebug_magics.probing.ops import written_by
from torchdebug_magics.probing.tensors import tensors_in

__all__ = ["Writes"]


class Writes:
    """Listens to the ops of a replay."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        """Memory that ops of the replay made; its addresses were free before, so none can be older."""
        self.contents = Contents()

    def listener(self, owner: object = None) -> OpListener:
        """The mode that sees every op of the replay; a sweep of the owner's finds it."""
        return OpListener(self._before_write, owner)

    def put_back(self) -> None:
        """Undo the writes."""
        self.contents.put_back()

    def _before_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        for tensor in written_by(func, args, kwargs):
            memory = memory_of(tensor)
            if memory and memory not in self._own:
                self.contents.keep(tensor)
        given = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}
        result = run()
        self._own.update({memory_of(tensor) for tensor in tensors_in(result)} - given)
        return result
