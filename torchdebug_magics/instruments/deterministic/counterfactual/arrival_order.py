"""The same start, with what another process may be given: folders listed and work finished in another order, another process number."""

from __future__ import annotations

import ast
import concurrent.futures
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from itertools import cycle
from multiprocessing.pool import Pool
from typing import Any

from torchdebug_magics.instruments.deterministic.counterfactual.effect import effect_of
from torchdebug_magics.instruments.deterministic.counterfactual.reachable_state import reached
from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording
from torchdebug_magics.instruments.deterministic.origin import Origin
from torchdebug_magics.instruments.deterministic.report import Dependence, On
from torchdebug_magics.instruments.deterministic.twice.op_causes import location_of
from torchdebug_magics.instruments.deterministic.twice.run_comparison import Difference
from torchdebug_magics.instruments.deterministic.twice.runs import Runs
from torchdebug_magics.probing.source.code_owner import frames_above, is_user_code, writes_of

_LISTING = ("listdir", "scandir", "iglob", "glob", "rglob", "iterdir", "walk")
_ARRIVING = ("as_completed", "imap_unordered")
_NUMBERED = ("getpid", "getppid")
_SORTED = {
    "walk": "sort both lists from `{}`: `dirs.sort()`, `files.sort()`",
    "scandir": "`sorted({}, key=lambda entry: entry.name)`",
}
_ORDINARY = {"listdir": os.listdir, "scandir": os.scandir}
_CALL = re.compile(rf"[\w.]*(?:\([^()]*\)\.)?\b({'|'.join((*_LISTING, *_ARRIVING, *_NUMBERED))})\((?:[^()]|\([^()]*\))*\)")


def on_arrival(
    runs: Runs, earlier: Recording, results: Mapping[str, int], origin_of: Callable[[Difference], Origin | None]
) -> Dependence | None:
    """What moves the results then; no run where nothing that is reached by name asks for such an order."""
    if not _asks(runs):
        return None
    turned = _Turned(runs.body.namespace)
    with runs.otherwise(turned):
        effect = effect_of(runs, earlier, results)
    if effect is None or not effect.reached:
        return None
    begin = min(effect.reached, key=lambda one: one.place)
    turns = cycle((False, True))
    with runs.otherwise(lambda stack: turned(stack) if next(turns) else None):
        origin = origin_of(begin)
    at = location_of(begin) if origin is None else origin.location
    called = _CALL.search(at.source) if at is not None else None
    name, text = (called[1], called[0]) if called is not None else ("", "")
    if name in _ARRIVING:
        what, fix = (
            f"`{name}` returns results in completion order, which varies",
            "iterate over the results in submission order",
        )
    elif name in _NUMBERED:
        what, fix = f"`{text}` differs in each process", f"replace `{text}` with a constant, such as 42"
    else:
        what = f"{f'`{text}` returns' if text else 'this line uses'} entries in file-system order, which differs between machines"
        fix = _SORTED.get(name, "`sorted({})`").format(text) if text else "sort the files"
    on: On = "entropy" if name in _NUMBERED else "order"
    return Dependence(on=on, op="" if begin.op is None else begin.op.plan.name, module=begin.module, location=at, what=what, fix=fix)


def _asks(runs: Runs) -> bool:
    asked = frozenset((*_LISTING, *_ARRIVING, *_NUMBERED))
    _, codes = reached(runs.body)
    in_body = {word for one in runs.body.statements for word in re.findall(r"\w+", ast.unparse(one))}
    return bool(asked & in_body) or any(asked & (written.loaded | written.loaded_attributes) for written in map(writes_of, codes))


class _Turned:
    """Each such order turned round, and each such number another, for one run."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace

    def __call__(self, stack: ExitStack) -> None:
        """From here until the stack closes."""
        self._put(stack, os, "listdir", _turned_list)
        self._put(stack, os, "scandir", _turned_scan)
        self._put(stack, concurrent.futures, "as_completed", _turned_iterator)
        self._put(stack, Pool, "imap_unordered", _turned_iterator)
        for name in _NUMBERED:
            self._put(stack, os, name, _of_another_process)

    def _put(self, stack: ExitStack, holder: Any, name: str, turning: Callable[[Any], Any]) -> None:
        ordinary = getattr(holder, name)
        turned = turning(ordinary)
        stack.callback(setattr, holder, name, ordinary)
        setattr(holder, name, turned)
        for known, value in list(self._namespace.items()):
            if value is ordinary or value is _ORDINARY.get(name):  # `from os import listdir` in an earlier cell
                stack.callback(self._namespace.__setitem__, known, value)
                self._namespace[known] = turned


def _turned_list(ordinary: Any) -> Any:
    def listed(*args: Any, **kwargs: Any) -> Any:
        names = ordinary(*args, **kwargs)
        return names if _is_import() else names[::-1]

    return listed


def _turned_scan(ordinary: Any) -> Any:
    class Scan(AbstractContextManager["Scan"]):
        """As `os.scandir` gives it: an iterator, and a context of itself."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with ordinary(*args, **kwargs) as entries:
                self._entries = iter([*entries] if _is_import() else [*entries][::-1])

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            return next(self._entries)

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            """Nothing is open."""

    return Scan


def _turned_iterator(ordinary: Any) -> Any:
    def turned(*args: Any, **kwargs: Any) -> Iterator[Any]:
        return iter(list(ordinary(*args, **kwargs))[::-1])

    return turned


def _of_another_process(ordinary: Any) -> Any:
    def number() -> int:
        """To the user's code alone: libraries know by it whether they were forked."""
        return ordinary() + (1 if is_user_code(sys._getframe(1).f_code) else 0)  # type: ignore[no-any-return]  # a number, as was asked

    return number


def _is_import() -> bool:
    for one in frames_above(sys._getframe(2)):
        if one.f_code.co_filename.startswith("<frozen importlib"):
            return True
        if is_user_code(one.f_code):
            break
    return False
