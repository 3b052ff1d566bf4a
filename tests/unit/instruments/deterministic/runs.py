"""A cell that is run twice as the instrument does it: once to find the op that differs, then again up to that op."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import random
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchdebug_magics
from torchdebug_magics.instruments.deterministic.origin import Origin, first_difference
from torchdebug_magics.probing.safety import Guard


class Stop(BaseException):
    """Ends a run inside an op."""


class Ops(TorchDispatchMode):
    """Hashes what each op gave, or stops at one of them."""

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.last = last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.last is not None and len(self.seen) == self.last:
            raise Stop
        given = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and "empty" not in str(func)]
        self.seen.append((str(func), [(one.shape, one.numpy(force=True).tobytes()) for one in tensors if one.layout is torch.strided]))
        return given


def _make_known(name: str, source: str) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


class Cell:
    """Some source under a name that has its lines, executed statement by statement as a notebook does it."""

    def __init__(self, source: str, name: str = "/home/me/cell_1.py", before: str = "", **names: Any) -> None:
        self.source = textwrap.dedent(source).lstrip("\n")
        self.name = name
        _make_known(name, self.source)
        tree = ast.parse(self.source)
        self.codes = [compile(ast.Module([node], []), name, "exec") for node in tree.body]
        self.start: dict[str, Any] = {"__name__": "__main__", "torch": torch, "np": np, "random": random, **names}
        _make_known("/home/me/before.py", textwrap.dedent(before))
        exec(compile(textwrap.dedent(before), "/home/me/before.py", "exec"), self.start)
        self.names: dict[str, Any] = {}
        self.guard = Guard()

    def line(self, mark: str = "# <-") -> int | None:
        return next((number for number, text in enumerate(self.source.splitlines(), 1) if mark in text), None)

    def restore(self) -> None:
        self.names.clear()
        self.names.update(self.start)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - the global one is the one that users draw from
        torch.manual_seed(0)

    def body(self, ops: Ops) -> None:
        ops.seen.clear()
        with ops:
            for code in self.codes:
                exec(code, self.names)

    def differing_op(self) -> int | None:
        runs = []
        for _ in range(2):
            self.restore()
            self.body(ops := Ops())
            runs.append(ops.seen)
        pairs = enumerate(zip(*runs, strict=False))
        found = next((number for number, (one, other) in pairs if one != other), None)
        return found if found is not None or len(runs[0]) == len(runs[1]) else min(map(len, runs))

    def origin(self, run: Callable[[], object] | None = None, **options: Any) -> Origin | None:
        return first_difference(run or functools.partial(self.body, Ops(self.differing_op())), self.restore, guard=self.guard, **options)


# As those of the instrument are, these are no code of the user's.
for function in (inspect.unwrap(Ops.__torch_dispatch__), Cell.body):
    function.__code__ = function.__code__.replace(co_filename=torchdebug_magics.__file__)
