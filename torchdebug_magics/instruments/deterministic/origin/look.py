"""What the names of a statement hold at one moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.instruments.deterministic.origin.names import fact
from torchdebug_magics.instruments.deterministic.origin.recording import Held

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.digests import Digests
    from torchdebug_magics.instruments.deterministic.origin.files import Files
    from torchdebug_magics.instruments.deterministic.origin.names import Namespace
    from torchdebug_magics.instruments.deterministic.origin.recording import Place
    from torchdebug_magics.instruments.deterministic.origin.statements import Statement

__all__ = ["Look"]


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
        for path in statement.paths:
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
