"""Data sets whose stored data are changed by reading them: what an item is made of is a part of these, and is written in place."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.source.edited_source import exchanging, statements
from torchdebug_magics.probing.source.syntax import covers, dotted, expression, nodes, targets_of, tree_of
from torchdebug_magics.probing.source.user_code import location

_MOST_PARTS, _MOST_BYTES, _MOST_ENTRIES = 64, 1 << 16, 1_000
"""Of an attribute that are looked at, of such a part, and of a list."""


class _Part(NamedTuple):
    """One of the tensors, arrays or lists that an attribute of a data set holds, as it was."""

    attribute: str
    place: object
    """Its index or key; None where the attribute itself is it."""
    identity: int
    digest: int
    copying: str
    """The method that makes a copy of it."""


class StoredData:
    """What map-style data sets hold before the first of their items is read; keeps digests, and no data."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Dataset[Any], list[_Part]] = weakref.WeakKeyDictionary()

    def meet(self, iterator: Any) -> None:
        """A loader is asked for a batch: of a new data set that is read in this process, note what it holds."""
        data = iterator._dataset
        while isinstance(data, Subset):
            data = data.dataset
        if iterator._num_workers == 0 and isinstance(data, Dataset) and data not in self._known:
            with modes_aside(), torch.no_grad():
                self._known[data] = list(_parts(data))

    def rewritten(self) -> AutogradFinding | None:
        """The first data set that holds other numbers now, in the very same tensors, arrays and lists."""
        for data, before in list(self._known.items()):
            with modes_aside(), torch.no_grad():
                now = {(part.attribute, part.place): part for part in _parts(data)}
            changed: dict[str, list[_Part]] = {}
            for part in before:
                after = now.get((part.attribute, part.place))
                if after is not None and after.identity == part.identity and after.digest != part.digest:
                    changed.setdefault(part.attribute, []).append(part)
            faults = (_rewritten(type(data), parts) for parts in changed.values())
            if (fault := next(filter(None, faults), None)) is not None:
                return fault
        return None


def _parts(data: Dataset[Any]) -> Iterator[_Part]:
    for attribute, value in list(vars(data).items()):
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        for place, part in ((None, value), *islice(items, _MOST_PARTS)):
            if (digest := _digest(part)) is not None:
                yield _Part(attribute, place, id(part), digest, "clone" if isinstance(part, torch.Tensor) else "copy")


def _digest(value: object) -> int | None:
    """A number for its contents; None for what is no plain tensor on the CPU, array or list of numbers or texts."""
    if type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu" and not value.is_conj():
        rows = value.detach().flatten()[: _MOST_BYTES // max(1, value.element_size())]
        return hash(rows.contiguous().view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return hash(value.flat[: _MOST_BYTES // max(1, value.itemsize)].tobytes())
    if type(value) is list and 0 < len(value) <= _MOST_ENTRIES and all(type(entry) in {int, float, str} for entry in value):
        return hash(tuple(value))
    return None


def _rewritten(kind: type, parts: list[_Part]) -> AutogradFinding | None:
    """Where ``__getitem__`` binds a name to a stored part; None where any statement writes into the attribute itself."""
    code = getattr(getattr(kind, "__getitem__", None), "__code__", None)
    tree = None if code is None else tree_of(code.co_filename)
    first_line = getattr(code, "co_firstlineno", 0)
    readers = [node for node in nodes(ast.FunctionDef, tree) if node.name == "__getitem__" and covers(node, first_line)]
    stored = f"self.{parts[0].attribute}"
    if code is None or any(_writes(statement, parts[0].attribute) for _, statement in statements(code.co_filename)):
        return None
    for statement in nodes(ast.Assign, *readers):
        value = statement.value
        if isinstance(value, ast.Subscript) and dotted(value.value) == stored:
            name, where = ast.unparse(statement.targets[0]), location(code.co_filename, statement.lineno, "__getitem__")
            many = f"{plural(len(parts), 'stored part')} of `{stored}` {'is' if len(parts) == 1 else 'are'}"
            return finding(
                "shared_memory",
                f"reading an item changes the data: `{name}` is a part of `{stored}`, and is written in place",
                where,
                edits=exchanging(where, value, expression(f"{ast.unparse(value)}.{parts[0].copying}()")),
                tensor=name,
                explanation=f"{many} not what was there before the first item was read: each epoch changes the data further",
            )
    return None


def _writes(statement: ast.stmt, attribute: str) -> bool:
    """Whether it writes into what an attribute of that name holds on purpose, as into a cache, or new labels for samples."""
    methods = [call.func for call in nodes(ast.Call, statement) if isinstance(call.func, ast.Attribute)]
    places = [function.value for function in methods if function.attr.endswith("_")]
    places += [target.value for target in targets_of(statement) if isinstance(target, ast.Subscript)]
    places += targets_of(statement) if isinstance(statement, ast.AugAssign) else []
    return any(isinstance(part, ast.Attribute) and part.attr == attribute for place in places for part in ast.walk(place))
