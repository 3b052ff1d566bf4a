"""Module paths: of several names of a shared module, the one inside the call that runs."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from torchdebug_magics.probing.modules import unwrapped

if TYPE_CHECKING:
    import torch

__all__ = ["Names"]


class Names:
    """Who holds whom under which name, learnt once a module however many ways lead to it."""

    def __init__(self) -> None:
        self._first: dict[int, str] = {}
        self._holders: dict[int, list[tuple[int, str]]] = {}

    def learn(self, root: torch.nn.Module) -> None:
        """The paths of a root and its parts."""
        for path, module in unwrapped(root).named_modules():
            if id(module) not in self._first:
                self._first[id(module)] = path
                for name, child in module._modules.items():
                    if child is not None:
                        self._holders.setdefault(id(unwrapped(child)), []).append((id(module), name))

    def path(self, module: torch.nn.Module, outer: torch.nn.Module | None, outer_path: str) -> str:
        """Its path inside `outer`, the call that runs; its first one where `outer` does not hold it."""
        if outer is None:
            return self._first.get(id(module), "")
        inside = self._inside(id(module), id(outer))
        if inside is None:
            return self._first.get(id(module)) or f"{outer_path}.{type(module).__name__}".lstrip(".")
        return f"{outer_path}.{inside}".lstrip(".") if inside else outer_path

    def _inside(self, module: int, outer: int) -> str | None:
        """From the module up to whoever holds it, nearest first: mostly one step, two through a list."""
        todo, seen = deque([(module, "")]), {module}
        while todo:
            one, path = todo.popleft()
            if one == outer:
                return path
            for holder, name in self._holders.get(one, ()):
                if holder not in seen:
                    seen.add(holder)
                    todo.append((holder, f"{name}.{path}" if path else name))
        return None
