"""What a run begins with, and another one must find again: objects, gradients, generators, names, the environment and the process."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import Queue
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from torchdebug_magics.instrument import Body
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import runs_alone
from torchdebug_magics.probing.state.attributes import Names, attributes_of
from torchdebug_magics.probing.state.contents import Contents
from torchdebug_magics.probing.state.kinds import ABSENT, hashes_by_itself
from torchdebug_magics.probing.state.snapshot import Bound, Snapshot

_OF_COMPILERS = "__"
"""How the names begin that a compiler puts beside the user's: what it has compiled stays, and looks for them."""
_ALL = Bound(objects=2_000_000, bytes=4 << 30)
_Make: TypeAlias = Callable[["dict[int, Any]"], Any]
"""Makes one anew; those that were made already, by the number of what they stand for."""
_GONE_THROUGH: tuple[Any, ...] = ([], (), range(0), range(1 << 70), "", "\xe9", b"", bytearray(), {}, {}.values(), {}.items(), set())
_GONE_BACK: tuple[Any, ...] = ([], {}, {}.values(), {}.items())


class StartState:
    """Of everything that a body can reach, at one moment. What tensors hold is not in it: see `Contents`."""

    def __init__(self, body: Body, guard: Guard, also: Iterable[str] = ()) -> None:
        self._body = body
        self._guard = guard
        self.names = frozenset(body.namespace.keys() - body.hidden)
        self._has_figures = bool(figures())
        self._snapshot = Snapshot([Names(body.namespace, self.names | frozenset(also)), *body.roots, figures()], _ALL)
        self._stand_ins = StandIns(self._snapshot.objects())

    @property
    def is_dense(self) -> bool:
        """Whether no gradient is sparse."""
        return all(leaf.gradient is None or leaf.gradient.layout is torch.strided for leaf in self._snapshot.gradients)

    def contents(self) -> Contents:
        """What all tensors hold now."""
        contents = Contents()
        for tensor in self._snapshot.of_kind(torch.Tensor):
            if not is_lazy(tensor):
                contents.keep(tensor)
        return contents

    def is_found_again(self, value: object) -> bool:
        """Whether something stands in for it in a later run."""
        return value in self._stand_ins

    def stand_in(self) -> None:
        """Let new objects stand where those are that cannot be put back in place; to be followed by `put_back`."""
        self._snapshot.put_in_place(self._stand_ins.made(), self._guard)

    def put_back(self) -> None:
        """Make all of it as it was; names that are new are gone."""
        for name in self._body.namespace.keys() - self._body.hidden - self.names:
            if not name.startswith(_OF_COMPILERS):
                del self._body.namespace[name]
        if runs_alone():  # else what a thread has put there meanwhile stays
            for queue in self._snapshot.of_kind(Queue):
                with queue.mutex:
                    queue.queue.clear()
        self._snapshot.put_back(self._guard)
        if not self._has_figures:  # pyplot itself may be new
            figures().clear()


_ITERATORS = frozenset(
    {enumerate, zip, map, filter, reversed, type(iter(int, 1)), type(itertools.tee(())[0])}
    | {var for var in vars(itertools).values() if isinstance(var, type)}
    | {type(iter(one)) for one in _GONE_THROUGH}
    | {type(reversed(one)) for one in _GONE_BACK}
)


class StandIns:
    """For some objects at one moment; the objects themselves stay as they are."""

    def __init__(self, objects: Iterable[object]) -> None:
        self._found: dict[int, tuple[Any, _Make]] = {}  # also keeps the objects alive, so that no id is given away
        for one in objects:
            self._take(one)

    def __contains__(self, value: object) -> bool:
        return id(value) in self._found

    def made(self) -> dict[int, Any]:
        """New ones, by the `id` of what they stand for."""
        made: dict[int, Any] = {}
        for value, _ in self._found.values():
            self._anew(value, made)
        return made

    def _take(self, value: Any) -> bool:
        """Whether it can be made anew."""
        if id(value) in self._found:
            return True
        if not isinstance(value, functools._lru_cache_wrapper):
            make = self._of_iterator(value)
        else:
            results = _results_of(value)
            make = None if results is None else lambda _: _cache(value, results)
        if make is not None:
            self._found[id(value)] = value, make
        return make is not None

    def _of_iterator(self, value: Any) -> _Make | None:
        if type(value) not in _ITERATORS:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some Pythons warn that this will go
                function, given, *state = value.__reduce__()
        except (TypeError, AttributeError, ValueError):
            return None
        state = [_copied(one) for one in state]
        parts = (*given, *_inside(state))
        # No generator can be made as it was, nor what is only known to give one thing after the other.
        if any(hasattr(type(part), "__next__") and attributes_of(part) is None and not self._take(part) for part in parts):
            return None

        def make(made: dict[int, Any]) -> Any:
            iterator = function(*(self._anew(one, made) for one in given))
            for one in state:
                iterator.__setstate__(self._anew(_copied(one), made))
            return iterator

        return make

    def _anew(self, part: Any, made: dict[int, Any]) -> Any:
        if isinstance(part, tuple):
            return tuple(self._anew(one, made) for one in part)
        if id(part) in self._found and id(part) not in made:
            made[id(part)] = self._found[id(part)][1](made)
        return made.get(id(part), part)


def _copied(state: Any) -> Any:
    return [*state] if type(state) is list else tuple(map(_copied, state)) if type(state) is tuple else state


def _inside(state: Any) -> Iterator[Any]:
    for one in state:
        if type(one) is tuple:
            yield from _inside(one)
        else:
            yield one


def _results_of(function: Any) -> dict[Any, Any] | None:
    """What a `functools.lru_cache` keeps, the oldest first; None where it keeps without a limit, or where that cannot be told."""
    kinds = {"_lru_list_elem", "_lru_cache_wrapper"}
    referents = [referent for referent in gc.get_referents(function) if getattr(referent, "__name__", "") not in kinds]
    table = next((place for place, one in enumerate(referents) if type(one) is dict and one is not vars(function)), None)
    if function.cache_parameters()["maxsize"] is None or table is None or table != 2 * len(referents[table]):
        return None
    keys = referents[:table:2]
    is_known = {*map(id, keys)} == {*map(id, referents[table])} and all(map(hashes_by_itself, keys))
    return dict(zip(keys, referents[1:table:2], strict=True)) if is_known else None


def _cache(function: Any, results: Mapping[Any, Any]) -> Any:
    """A new cache that gives what the other one kept: only calls put something in, so each result is handed over when it is asked for."""
    parameters, kept = function.cache_parameters(), dict(results)
    marks = [referent for referent in gc.get_referents(function) if type(referent) is object]  # between arguments and those with a name

    def called(*args: Any, **kwargs: Any) -> Any:
        key: Any = functools._make_key(args, kwargs, parameters["typed"], tuple(marks[-1:]))
        result = kept.pop(tuple(key) if isinstance(key, list) else key, ABSENT)
        if result is not ABSENT:
            return result
        if kept and len(kept) + cache.cache_info().currsize >= parameters["maxsize"]:
            del kept[next(iter(kept))]
        return function.__wrapped__(*args, **kwargs)

    cache: Any = functools.lru_cache(**parameters)(called)
    vars(cache).update(vars(function))
    return cache


def figures() -> dict[Any, Any]:
    """By number, the very dict; one of nobody's where pyplot was not imported."""
    helpers: Any = sys.modules.get("matplotlib._pylab_helpers")
    return {} if helpers is None else helpers.Gcf.figs
