"""What was read when the cell was stopped, read once more here: a sample whose ``while`` goes round for ever, or items without an end."""

from __future__ import annotations

import ast
import os
import pickle
import select
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, _DatasetKind
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchdebug_magics.format import listed, one_line, plural
from torchdebug_magics.instruments.hangwatch.report import HangFinding, unending
from torchdebug_magics.probing.source.call_sites import MISSING, function_node, value_of
from torchdebug_magics.probing.source.edited_source import exchanging
from torchdebug_magics.probing.source.syntax import LOOPS, Loop, called, covers, enclosing, expression, last_line, names_in, nodes, tree_of
from torchdebug_magics.probing.source.user_code import is_user_code, location, raised_at
from torchdebug_magics.probing.state.read_once import is_read_once
from torchdebug_magics.probing.state.what_follows import EnoughError
from torchdebug_magics.probing.tensors import describe

T = TypeVar("T")
_MOST_ROUNDS, _MOST_ITEMS, _MOST_S, _MOST_SENT_BYTES = 200, 100_000, 3.0, 60_000
_MOSTLY = 0.9
"""Share of the rounds that end alike."""
_SHOWN_CHARS, _LONGEST_PATH = 90, 500


def endless_sample(error: BaseException) -> HangFinding | None:
    """Why a worker gives no batch: a ``while`` in which its data set goes round; None where its first batch can be read here."""
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    iterator: Any = next((value for value in frames if isinstance(value, _MultiProcessingDataLoaderIter)), None)
    if iterator is None or is_read_once([iterator._dataset, iterator._collate_fn]):
        return None
    given = iterator._dataset_kind, iterator._dataset, iterator._auto_collation, iterator._collate_fn, iterator._drop_last

    def read() -> HangFinding | None:
        rounds = _Rounds()
        with rounds.followed(), suppress(Exception):  # a sample that raises has an end
            fetcher = _DatasetKind.create_fetcher(*given)
            for indices in iterator._index_sampler:
                fetcher.fetch(indices)
        return rounds.finding()

    return _in_child(read)


def endless_items(loops: Sequence[Loop], frame: FrameType) -> HangFinding | None:
    """A ``for`` over what has no end: an iterable, the sampler of a loader, or what is indexed from 0 up and raises no IndexError."""
    for loop in reversed(loops):
        if not isinstance(loop, ast.For) or any(nodes((ast.Break, ast.Return), *loop.body)):
            continue
        node = loop.iter
        if isinstance(node, ast.Call) and node.args and (called(node) == "enumerate" or called(node).startswith("tqdm")):
            node = node.args[0]
        value = value_of(node, frame)
        if isinstance(value, DataLoader):
            sampler: Any = value.sampler if value.batch_sampler is None else value.batch_sampler
            own = next((each for each in (sampler, getattr(sampler, "sampler", None)) if type(each).__module__ == "__main__"), None)
            finding = _never_ends(node, own, "the indices of one epoch", len_of=value.dataset)
        elif hasattr(type(value), "__iter__"):
            finding = _never_ends(node, value, "the last item")
        else:
            finding = None if value is MISSING else _no_index_error(node, value, frame, loop)
        if finding is not None:
            return finding
    return None


def _never_ends(node: ast.expr, source: Any, last: str, len_of: Any = None) -> HangFinding | None:
    """An iterable of the cell's that has given ten times as many items as there are, where that is known."""
    kind: Any = type(source)
    name = "__next__" if hasattr(kind, "__next__") else "__iter__"
    code = getattr(getattr(kind, name, None), "__code__", None)
    if kind.__module__ != "__main__" or code is None:
        return None
    lengths = [len(each) for each in (source, len_of) if hasattr(each, "__len__")]
    most = 10 * max(lengths) + _MOST_ROUNDS if lengths else _MOST_ITEMS
    if not _in_child(lambda: sum(1 for _ in islice(iter(source), most)) >= most):
        return None
    return unending(
        f"the loop over `{ast.unparse(node)}` never ends: `{kind.__name__}.{name}` has given {most:,} items, and goes on",
        location(code.co_filename, code.co_firstlineno, code.co_name),
        f"let `{kind.__name__}.{name}` {'raise StopIteration' if name == '__next__' else 'return'} after {last}",
    )


def _no_index_error(node: ast.expr, value: Any, frame: FrameType, loop: Loop) -> HangFinding | None:
    """An object without ``__iter__`` that gives an item behind its length, too."""
    if not (hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")):
        return None

    def goes_on() -> bool:
        with suppress(Exception):  # any error ends the loop
            value[len(value)]
            return True
        return False

    if not _in_child(goes_on):
        return None
    name, where = ast.unparse(node), location(frame.f_code.co_filename, loop.lineno, frame.f_code.co_name)
    each = expression(f"({name}[i] for i in range(len({name})))")
    return unending(
        f"the loop over `{name}` goes on after its {plural(len(value), 'item')}: `{name}[{len(value)}]` raises no IndexError",
        where,
        f"loop over `{ast.unparse(each)}`, or raise IndexError in `{type(value).__name__}.__getitem__`",
        edits=exchanging(where, node, each),
    )


class _Rounds:
    """Follows the rounds of each ``while`` of the user's, and how they end."""

    def __init__(self) -> None:
        self._ends: dict[tuple[FrameType, ast.While], Counter[tuple[int, str]]] = {}
        """By the loop in a frame that runs: (line, type of the error that was caught) of what ended each of its rounds."""
        self._error: Any = None
        """The last that was caught."""
        self._half_way: dict[str, str] = {}
        """What variables held after half of the rounds."""
        self._values: dict[str, Any] = {}
        """Of the frame, when the rounds were enough."""

    def finding(self) -> HangFinding | None:
        """What the rounds of the loop that goes on have in common."""
        endless = next(((place, ends.most_common(1)[0]) for place, ends in self._ends.items() if ends.total() >= _MOST_ROUNDS), None)
        if endless is None or endless[1][1] < _MOSTLY * _MOST_ROUNDS:
            return None
        (frame, loop), ((line, error), _) = endless
        head, file = f"`while {ast.unparse(loop.test)}` in `{frame.f_code.co_name}`", frame.f_code.co_filename
        where = location(file, line, frame.f_code.co_name)
        again = f"samples were read again here: {_MOST_ROUNDS} rounds of the loop ended alike"
        if error:
            why = f"{head} goes round for ever: it catches a {error} in each round"
            where = raised_at(self._error) or where
            return unending(why, where, f"let the error out, `{_shown(self._error)}`, or give up after some rounds", reason=again)
        tests = [node.test for node in enclosing(tree_of(file), line) if isinstance(node, ast.If) and node.lineno > loop.lineno]
        test = tests[-1] if tests else loop.test
        named = [name for name in sorted(names_in(test)) if name in self._values]
        if any(repr(self._values[name]) != self._half_way.get(name) for name in named):
            return None  # it goes on
        values = [f"`{name}` = {_shown(self._values[name])}" for name in named]
        lacking = [name for name in sorted(names_in(*loop.body)) if _is_no_path(self._values.get(name))]
        values += [f"nothing is at `{name}` = {_shown(self._values[name])}" for name in lacking if name not in names_in(test)]
        why = f"each round ends here, as `{ast.unparse(test)}`" if tests else f"`{ast.unparse(test)}` stays true"
        fix = f"look at {listed(values)}; and raise an error where no sample will do" if values else "leave the loop after some rounds"
        return unending(f"{head} goes round for ever: {why}", where, fix, reason=again)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, up to so many rounds are made."""
        sys.settrace(self._look)
        try:
            yield
        except EnoughError:
            pass
        finally:
            sys.settrace(None)

    def _look(self, frame: FrameType, event: str, _: object) -> Any:
        """At the call of a function: with a ``while`` in it, its lines are followed."""
        if event != "call" or not is_user_code(frame.f_code):
            return None
        loops = [*nodes(ast.While, function_node(frame.f_code))]
        return self._lines(frame, loops) if loops else None

    def _lines(self, frame: FrameType, loops: list[ast.While]) -> Callable[[FrameType, str, Any], Any]:
        before, caught = 0, ""

        def trace(_: FrameType, event: str, value: Any) -> Any:
            nonlocal before, caught
            if event == "exception" and value[0] is not StopIteration:
                caught, self._error = value[0].__name__, value[1]
            elif event == "line":
                heads = [loop for loop in loops if frame.f_lineno in {loop.lineno, loop.body[0].lineno}]
                again = [loop for loop in heads if loop.body[0].lineno <= before <= last_line(loop)]
                is_inner = bool(again) and covers(again[-1].body[0], before) and isinstance(again[-1].body[0], LOOPS)
                if again and not is_inner:
                    self._ended(frame, again[-1], (before, caught))
                    caught = ""
                before = frame.f_lineno
            elif event == "return":
                self._ends = {place: ends for place, ends in self._ends.items() if place[0] is not frame}
            return trace

        return trace

    def _ended(self, frame: FrameType, loop: ast.While, end: tuple[int, str]) -> None:
        ends = self._ends.setdefault((frame, loop), Counter())
        ends[end] += 1
        if ends.total() == _MOST_ROUNDS // 2:
            known = {**frame.f_globals, **frame.f_locals}
            self._half_way = {name: repr(known[name]) for name in names_in(loop) & known.keys()}
        if ends.total() >= _MOST_ROUNDS:
            self._values = {**frame.f_globals, **frame.f_locals}
            raise EnoughError(is_late=False)


def _is_no_path(value: Any) -> bool:
    return isinstance(value, str) and os.sep in value and len(value) < _LONGEST_PATH and not os.path.lexists(value)


def _shown(value: Any) -> str:
    text = describe(value) if isinstance(value, torch.Tensor) else one_line(str(value) if isinstance(value, BaseException) else repr(value))
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _in_child(work: Callable[[], T]) -> T | None:
    """What it returns in a fork of this process, which is killed where it takes too long: as a worker reads, and nothing here changes."""
    if not hasattr(os, "fork"):
        return None
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            sys.settrace(None)
            torch.set_num_threads(1)
            sent = pickle.dumps(work())
            os.write(writes, sent[:_MOST_SENT_BYTES])
        os._exit(0)
    os.close(writes)
    try:
        is_there = bool(select.select([reads], [], [], _MOST_S)[0])
        sent = os.read(reads, _MOST_SENT_BYTES) if is_there else b""
        return pickle.loads(sent) if sent else None  # noqa: S301 - our own fork wrote it
    finally:
        os.close(reads)
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)
        with suppress(OSError):
            os.waitpid(child, 0)
