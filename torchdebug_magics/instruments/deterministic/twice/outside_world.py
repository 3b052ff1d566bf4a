"""What a run takes from outside, or leaves there: files, and what the user types."""

from __future__ import annotations

import builtins
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdebug_magics.errors import DeterminismError
from torchdebug_magics.instruments.deterministic.twice.children import Children
from torchdebug_magics.instruments.deterministic.twice.disk.before import Before
from torchdebug_magics.instruments.deterministic.twice.disk.databases import Databases, connecting, is_database
from torchdebug_magics.instruments.deterministic.twice.disk.disk_calls import held
from torchdebug_magics.instruments.deterministic.twice.disk.elsewhere import Elsewhere
from torchdebug_magics.instruments.deterministic.twice.disk.handles import Handles, is_file
from torchdebug_magics.instruments.deterministic.twice.disk.noted import REFUSED, Noted
from torchdebug_magics.instruments.deterministic.twice.disk.view import View
from torchdebug_magics.probing.names import Named, values_found

if TYPE_CHECKING:
    from torchdebug_magics.probing.guard import Guard

__all__ = ["Outside"]


class Outside:
    """Files are changed and questions asked by the first run alone: later ones change copies, and hear the same answers."""

    def __init__(self, namespace: dict[str, Any], guard: Guard, *, strict: bool) -> None:
        self._namespace = namespace
        self._strict = strict
        """Whether the user's line that does such a thing raises."""
        self._answers: list[str] = []
        self._before = Before()
        self._handles = Handles(self._before, guard)
        self._noted = Noted(self._before, self._handles, strict=strict)
        self._children = Children(self._refuse_child)
        self._databases = Databases(())
        self._closed: tuple[str, ...] = ()
        self._undos: list[Callable[[], None]] = []

    @property
    def said(self) -> tuple[str, ...]:
        """What a second run does not find as the first one did."""
        asked = ("the answer typed for `input()`",) if self._answers else ()
        added_to = (f"the file {name}, which the cell appends to" for name in self._noted.appended)
        return (*asked, *added_to, *self._closed, *self._children.said)

    @property
    def has_children(self) -> bool:
        """Whether the first run has started processes, which each further run starts again."""
        return bool(self._children.said)

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the files that the first run has written, made or removed."""
        return tuple(Path(path).name for path in self._before if not Path(path).is_dir())

    @property
    def refusal(self) -> str:
        """Why there can be no later run, now that the first one has ended; or nothing."""
        name = self._databases.changed()
        return f"the cell changed the database behind `{name}`; a second run would change it again" if name else ""

    def first(self, stack: ExitStack, variables: Mapping[str, object]) -> None:
        """Note what happens, from here until the stack closes."""
        ask = builtins.input
        names = (Named(name, value) for name, value in {**self._namespace, **variables}.items() if not name.startswith("_"))
        found = values_found(names, lambda value: is_file(value) or is_database(value))
        self._handles.before_run(one.value for one in found if is_file(one.value))
        self._databases = Databases(one for one in found if is_database(one.value))

        def asked(*prompt: Any) -> str:
            __tracebackhide__ = True
            if self._strict:
                raise DeterminismError(REFUSED.format("`input()` reads an answer"))
            self._answers.append(ask(*prompt))
            return self._answers[-1]

        self._stand_in(stack, asked, self._noted.calls(), connecting(self._noted.changes), *self._children.calls())

    def over(self) -> None:
        """The first run has ended."""
        self._closed = self._handles.over()

    def again(self, stack: ExitStack, *, as_left: bool = False) -> None:
        """Nothing gets out, from here until the stack closes; the disk is as the first run found it, or, `as_left`, has left it."""
        answers = deque(self._answers)
        view = View(
            self._before.as_now() if as_left else self._before, stack.enter_context(tempfile.TemporaryDirectory(prefix="torchdebug-"))
        )
        stack.callback(view.finish)

        def asked(*_prompt: Any) -> str:
            if not answers:
                raise EOFError
            return answers.popleft()

        self._handles.lead_to(view, stack)
        self._stand_in(stack, asked, Elsewhere(view).calls(), connecting(view.to_write), (shutil, "_use_fd_functions", False))

    def undo(self) -> None:
        """Nothing stands in any more. Harmless where nothing does."""
        while self._undos:
            self._undos[-1]()

    def _refuse_child(self, name: str) -> None:
        __tracebackhide__ = True
        if self._strict:
            raise DeterminismError(REFUSED.format(f"the child process `{name}` is started"))

    def _stand_in(self, stack: ExitStack, asked: Any, calls: dict[str, Any], *others: tuple[Any, str, Any]) -> None:
        places = [(builtins, "input", asked), *held(self._namespace, calls), *others]
        before = [_look_up(holder)[name] for holder, name, _ in places]

        def undo() -> None:
            ordinary: dict[int, Any] = {}
            for (holder, name, function), was in zip(places, before, strict=True):
                ordinary.setdefault(id(function), was)
                if _look_up(holder).get(name) is function:  # else the user has put something there, and it stays
                    _put(holder, name, was)
            for name, value in list(self._namespace.items()):
                if id(value) in ordinary:  # the user has given it a name of theirs
                    self._namespace[name] = ordinary[id(value)]
            if undo in self._undos:
                self._undos.remove(undo)

        self._undos.append(undo)
        stack.callback(undo)
        for holder, name, function in places:
            _put(holder, name, function)


def _look_up(holder: Any) -> Mapping[str, Any]:
    return holder if isinstance(holder, dict) else vars(holder)


def _put(holder: Any, name: str, function: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = function
    else:
        setattr(holder, name, function)
