"""What the names of a statement hold at one moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.deterministic.origin.lines.line_names import fact
from torchdebug_magics.instruments.deterministic.origin.lines.line_steps import Held

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.lines.digests import Digests
    from torchdebug_magics.instruments.deterministic.origin.lines.line_names import Namespace
    from torchdebug_magics.instruments.deterministic.origin.lines.line_statements import Statement
    from torchdebug_magics.instruments.deterministic.origin.lines.line_steps import Place
    from torchdebug_magics.instruments.deterministic.origin.lines.written_files import Files

__all__ = ["Look"]

_OF_PARTS = (torch.nn.Module, torch.optim.Optimizer)


class Look:
    """What names hold at one moment; a name that is asked for twice is looked at once."""

    def __init__(self, names: Namespace, digests: Digests, files: Files) -> None:
        self._names = names
        self._digests = digests
        self._files = files
        self._known: dict[str, tuple[str, Held] | None] = {}

    def all(self, statement: Statement) -> dict[str, Held]:
        """By the name of each value."""
        found = {}
        for path in (*statement.paths, *self._holders(statement.paths)):
            known = self._known[path] if path in self._known else self._of(path, statement)
            self._known[path] = known
            if known is not None:
                found[known[0]] = known[1]
        return found

    def inside(self, statement: Statement) -> dict[str, dict[Place, int]]:
        """What containers hold, and objects of the user's in them."""
        found = {}
        for path in statement.paths:
            known = self._names.find(path)
            if known is not None:
                inner = dict(self._digests.inside(known[1]))
                if inner:
                    found[known[0]] = inner
        return found

    def _holders(self, paths: tuple[str, ...]) -> Iterator[str]:
        """Of `optimizer.param_groups` the optimizer, too: what it does is another thing when its parts are."""
        for root in dict.fromkeys(path.partition(".")[0] for path in paths if "." in path):
            found = self._names.find(root)
            if found is not None and isinstance(found[1], _OF_PARTS):
                yield root

    def _of(self, path: str, statement: Statement) -> tuple[str, Held] | None:
        found = self._names.find(path)
        if found is None:
            return None
        known, value, place = found
        if word := fact(value):
            statement.facts[known] = word
            if word == "file":
                self._files.met(value)
        return known, Held(place, self._digests.of(value))
