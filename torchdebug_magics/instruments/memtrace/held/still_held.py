"""``del model`` that frees nothing: what else holds what that name stood for."""

from __future__ import annotations

import ast
import sys
import traceback
import weakref
from collections.abc import Sequence
from contextlib import closing
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.memtrace.findings import Undeleted
from torchdebug_magics.instruments.memtrace.held.keepers import Keepers
from torchdebug_magics.instruments.memtrace.held.leak_fixes import Cause, fix
from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Ledger
from torchdebug_magics.instruments.memtrace.ledger.phases import PARAMETER
from torchdebug_magics.memory.found import find_holders
from torchdebug_magics.memory.paths import NOWHERE, HolderPath
from torchdebug_magics.memory.roots import roots
from torchdebug_magics.memory.walk import Walk
from torchdebug_magics.probing.source.syntax import own_nodes, tree_of
from torchdebug_magics.probing.source.user_code import frames_above, is_user_code, locate, location
from torchdebug_magics.probing.state.attributes import undisturbed
from torchdebug_magics.probing.storages import storages
from torchdebug_magics.probing.tensors import tensors_in

_HIDDEN = ("Out", "sys.last", "InteractiveTB", "last_execution_result", "weakref.finalize")
"""How the label of a root begins that one does not see among the variables."""
_LEAST_BYTES = 64 << 10
_LARGE_PART = 0.25
_MOST_LOOKS = 3
_MOST_VISITS = 300_000
_FIX = (
    "retry after the `except` block, not in it: set a flag there, `failed = True`, and write `if failed:` after it. "
    "Until the block ends, the error's traceback keeps the variables of the failed call"
)


class Deletions:
    """The names that the running cell deletes, and what those stand for that are there before it."""

    def __init__(self, frame: FrameType | None) -> None:
        self._file = "" if frame is None else frame.f_code.co_filename
        names = (node for node in own_nodes(tree_of(self._file)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del))
        self._lines = {node.id: node.lineno for node in names} if self._file else {}
        space: dict[str, Any] = {} if frame is None else frame.f_globals
        self._names = space if self._lines else {}
        self._before = {name: [weakref.ref(storage) for storage in _storages_of(space[name])] for name in self._lines if name in space}

    def found(self, made: Sequence[Block], keepers: Keepers, peak_bytes: int) -> Undeleted | None:
        """What is still there of one of them; of those that came and went in the cell, a model's that only something unseen holds."""
        gone = {name: line for name, line in self._lines.items() if name not in self._names}
        self._names = {}
        for name in gone.keys() & self._before.keys():
            alive = {one._cdata: one.nbytes() for ref in self._before[name] if (one := ref()) is not None}
            held = find_holders(alive)
            path = next((held.paths[key] for key in sorted(alive, key=lambda key: -alive[key]) if key in held.paths), NOWHERE)
            if sum(alive.values()) >= _LEAST_BYTES and path:
                return self._of(name, gone[name], sum(alive.values()), path)
        hidden = [block for block in made if block.role == PARAMETER and _is_hidden(keepers.of(block))]
        size_bytes = sum(block.bytes for block in hidden)
        made_here = [name for name in gone if name not in self._before]
        if not made_here or size_bytes < max(_LEAST_BYTES, _LARGE_PART * peak_bytes):
            return None
        path = keepers.of(max(hidden, key=lambda block: block.bytes))
        return self._of(made_here[0], gone[made_here[0]], size_bytes, path)

    def _of(self, name: str, line: int, size_bytes: int, path: HolderPath) -> Undeleted:
        known = fix(path, Cause(keeps_graph=False, trains=False)) if _is_hidden(path) else ""
        if path.in_function_cache:
            known = (
                "give each object its own cache, or clear it before the `del` with `cache_clear()`: "
                "a cache on a method keeps `self` in its keys"
            )
        return Undeleted(
            name=name,
            location=location(self._file, line, ""),
            live_bytes=size_bytes,
            holder=str(path),
            fix=known or f"also delete what holds it: `del {path.root}`",
        )


def _is_hidden(path: HolderPath) -> bool:
    return path.in_function_cache or path.through_hook or path.label.startswith(_HIDDEN)


def _storages_of(value: object) -> list[torch.UntypedStorage]:
    known = [*value.parameters(), *value.buffers()] if isinstance(value, torch.nn.Module) else tensors_in(value)
    return [storage for tensor in known for storage in storages(tensor)]


class HandledErrors:
    """Looks, where a model is called while an error is handled, at what nothing but that error holds."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._looks = 0
        self._latest = 0
        """The id of the error that was looked at."""
        self._most: Undeleted | None = None

    def look(self) -> None:
        """A model is called."""
        error = sys.exc_info()[1]
        if error is None or id(error) == self._latest or self._looks == _MOST_LOOKS:
            return
        self._latest, self._looks = id(error), self._looks + 1
        raised = {id(frame) for frame, _ in traceback.walk_tb(error.__traceback__)}
        # The call of the user's that handles it: the innermost that runs and that it came by.
        frame = next((frame for frame in frames_above(sys._getframe()) if id(frame) in raised and is_user_code(frame.f_code)), None)
        if frame is None:
            return
        self._ledger.settle()
        sizes = {block.ref.key: block.bytes for block in self._ledger.live.values() if block.ref is not None}
        with undisturbed(), closing(Walk([root for root in roots() if root.value is not error], sizes, _MOST_VISITS)) as walk:
            only_by_error = set(sizes) - set(walk.holders) if walk.is_whole else set()
        held = find_holders(only_by_error).paths
        size_bytes = sum(sizes[key] for key in held)
        if size_bytes >= max(_LEAST_BYTES, 0 if self._most is None else self._most.live_bytes + 1):
            path = held[max(held, key=lambda key: sizes[key])]
            self._most = Undeleted(name="", location=locate(frame), live_bytes=size_bytes, holder=str(path), fix=_FIX)

    def found(self, peak_bytes: int) -> Undeleted | None:
        """What a retry found held, where it is much of what there was."""
        return self._most if self._most is not None and self._most.live_bytes >= _LARGE_PART * peak_bytes else None
