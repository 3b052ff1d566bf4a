"""The training of a cell, once more from fresh models, with edits of the user's code; nothing of it is left behind.

What the cell reads may come from earlier cells, and its models are trained by now. So the statements that made models, optimizers and
what depends on an edit run anew, each once and in their order, then the cell itself, for as many steps as are asked for.
"""

from __future__ import annotations

import ast
import linecache
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError, error_line
from torchdebug_magics.fixes import applied
from torchdebug_magics.probing.compiler import eager
from torchdebug_magics.probing.distributed import this_rank
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.safety import Guard, interrupts_held, quiet
from torchdebug_magics.probing.source.edited_source import Source, cells
from torchdebug_magics.probing.source.syntax import bound_names, called, method, nodes, parsed, read_names, root_of
from torchdebug_magics.probing.state.attributes import Names
from torchdebug_magics.probing.state.read_once import is_read_once, reaches_beyond
from torchdebug_magics.probing.state.snapshot import KeptState
from torchdebug_magics.probing.state.what_follows import EnoughError, clock_s
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.report import Edit

_MOST_S, _ALL_S = 12.0, 36.0
"""Of one run, and of all, by `clock_s`: a net for slow trainings. A run that it ends counts as far as it came."""
_MOST_WALL_S = 60.0
"""Of all, by a plain clock: what waits for something else is not computed any sooner."""
_SEED = "import torch as _torch, random as _random, numpy as _numpy\n_torch.manual_seed({0}); _random.seed({0}); _numpy.random.seed({0})"
_LOST_STEPS = 8
"""With a loss that is no number, after which it will not become one."""
_MOST_PASSES = 4
"""Backward passes for each step that is asked for, where no optimizer makes any."""
_MOST_KEEPING_S = 2.0
"""Of looking at all that the names reach, which is put back after each run."""
_MOST_BYTES = 256 << 20
"""Of the models and optimizers, which are copied and made several times."""
_TRAINED = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_FILLS = "_"
"""Ends the names of what writes into its argument, as ``nn.init.xavier_uniform_`` does."""


_OF_IPYTHON = re.compile(r"_+|_i*\d*|_i+|_[odi]h|__\w+__|In|Out|get_ipython|exit|quit|open")
"""Names through which all of the shell is reached."""


@dataclass
class Run:
    """What a run came to."""

    losses: list[float] = field(default_factory=list)
    """What backward() was called on, the last of each step."""
    error: str = ""
    """The error that ended it."""
    was_stopped: bool = False
    """Whether what watched it raised that error, and not the user's code."""
    is_complete: bool = False
    """Whether it made all its steps, or came to the end of the cell."""


class _Counting:
    """Notes the loss of each step, and ends the run after the last one."""

    def __init__(self, steps: int, *, may_diverge: bool) -> None:
        self.run, self.is_in_cell, self._may_diverge = Run(), False, may_diverge
        self.passes: list[float] = []
        """What each backward pass began with."""
        self._steps = steps

    def differentiated(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of ``backward()``."""
        values = [tensor.detach().float().mean() for tensor in tensors_in([tensors])]
        self.passes.append(float(sum(values)) if values else math.nan)
        if not self.run.losses and self.is_in_cell and len(self.passes) > _MOST_PASSES * self._steps:
            self.run.is_complete = True
            raise EnoughError(is_late=False)
        return original(tensors, *args, **kwargs)

    def updated(self, *_: object) -> None:
        """After a step of an optimizer."""
        self.run.losses.append(self.passes[-1] if self.passes else math.nan)
        last = self.run.losses[-_LOST_STEPS:]
        is_lost = len(last) == _LOST_STEPS and not any(map(math.isfinite, last)) and not self._may_diverge
        self.run.is_complete = self.is_in_cell and (is_lost or len(self.run.losses) >= self._steps)
        if not self.is_in_cell or self.run.is_complete:
            raise EnoughError(is_late=False)


class TrainingAgain:
    """The first steps of a cell's training, which was compiled as `file`; `unshown` keeps what it displays from the notebook."""

    def __init__(self, file: str, guard: Guard, unshown: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._guard, self._unshown = guard, unshown
        self._hooks = Hooks(guard)
        self._cell: Source | None = next((cell for cell in cells() if file and cell.where.file == file), None)
        self._space: dict[str, Any] = vars(sys.modules["__main__"])
        self._left_s, self._until_wall_s = _ALL_S, time.monotonic() + _MOST_WALL_S

    @property
    def can_run(self) -> bool:
        """Whether it may be run: in one process, with models of which there is room for copies."""
        if self._cell is None or this_rank.world_size() > 1 or not self._is_repeatable():
            return False
        trained = [value for value in list(self._space.values()) if isinstance(value, _TRAINED[:2])]
        tensors = {id(tensor): tensor for value in trained for tensor in tensors_in([_tensors_of(value)])}
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return size_bytes <= _MOST_BYTES

    @property
    def spent_s(self) -> float:
        """On all runs so far, by a clock that goes slower while other programs have the processor."""
        return _ALL_S - self._left_s

    def _is_repeatable(self) -> bool:
        """Whether neither the cell nor the functions and classes of any cell do what cannot be done twice."""
        assert self._cell is not None
        own = [statement for statement in self._cell.tree.body if not _is_magic(statement)]
        code = [*own, *(node for cell in cells() for node in nodes((ast.FunctionDef, ast.ClassDef), cell.tree))]
        read = {node.id for node in nodes(ast.Name, *code)} - {"get_ipython", "In", "Out"}
        return bool(own) and not reaches_beyond(self._space, *code) and not is_read_once(self._space.get(name) for name in read)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, `run` may be called. Raises `Irrevocable` where what the cell does cannot be undone."""
        assert self._cell is not None
        self._before, begin_s = dict(self._space), clock_s()
        visible = frozenset(name for name in self._space if not _OF_IPYTHON.fullmatch(name))
        effects = Effects(self._guard, self._space, self._cell.tree, sentence="{} cannot be undone")
        self._kept = KeptState([Names(self._space, visible)], self._guard, effects)
        self._left_s -= clock_s() - begin_s
        if not self._kept.is_whole or _ALL_S - self._left_s > _MOST_KEEPING_S:
            self._left_s = 0.0  # each trial would take as long to put things back
        try:
            with effects.trial():
                yield
        finally:
            with interrupts_held():
                self._hooks.sweep()
                self._put_back()
                effects.finish()

    def run(
        self, edits: Sequence[Edit], steps: int, watched: AbstractContextManager[object] | None = None, *, seed: int | None = None
    ) -> Run | None:
        """So many steps with the edits, inside `watched`; None where they do not parse, or another training comes before the cell's.

        With a `seed`, it takes the place of those that the statements of the cells set.
        """
        program = self._program(edits)
        if program is None or self._left_s <= 0 or time.monotonic() > self._until_wall_s:
            return None
        if seed is not None:
            unseeded = [(file, [each for each in own if not _is_seed(each)], is_cell) for file, own, is_cell in program]
            program = [("<seed>", ast.parse(_SEED.format(seed)).body, False), *unseeded]
        begin_s, counting = clock_s(), _Counting(steps, may_diverge=watched is not None)
        result, until_s = counting.run, begin_s + min(_MOST_S, self._left_s)
        try:
            with ExitStack() as stack, quiet(), self._unshown(), eager(), _limited(until_s, self._until_wall_s):
                stack.enter_context(_reading(self._texts(edits)))
                self._hooks.autograd_calls(stack, "backward", counting.differentiated)
                self._hooks.optimizer_steps(stack, lambda *_: None, counting.updated)
                with suppress(EnoughError):
                    for file, statements, counting.is_in_cell in program:
                        if counting.is_in_cell:  # what was made before is not seen there either
                            stack.enter_context(watched or nullcontext())
                        code = compile(ast.Module(statements, []), file, "exec")
                        exec(code, self._space)  # noqa: S102 - the user's own cells
                    result.is_complete = True
        except (Irrevocable, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it raises is the answer
            result.error, result.was_stopped = error_line(error), isinstance(error, TorchDebugError)
        finally:
            self._put_back()
            self._left_s -= clock_s() - begin_s
        result.losses = result.losses or counting.passes
        return result if counting.is_in_cell else None

    def _program(self, edits: Sequence[Edit]) -> list[tuple[str, list[ast.stmt], bool]] | None:
        """(file, statements, whether it is the cell itself) of each cell that is concerned, in their order."""
        assert self._cell is not None
        latest = self._cell
        numbered = sorted(cells(), key=lambda cell: cell.where.cell or 0)
        earlier = [cell for cell in numbered if (cell.where.cell or 0) < (latest.where.cell or 0)]
        by_file: dict[str, list[Edit]] = {}
        for edit in edits:
            by_file.setdefault(edit.file, []).append(edit)
        if not by_file.keys() <= {cell.where.file for cell in (*earlier, latest)}:
            return None
        edited, trained = set[str](), set[str]()
        program: list[tuple[str, list[ast.stmt], bool]] = []
        for cell in (*earlier, latest):
            tree = _edited_tree(cell, by_file.get(cell.where.file, ()))
            if tree is None:
                return None
            own = [statement for statement in tree.body if not _is_magic(statement)]
            if cell is not latest:
                known = {ast.dump(statement) for statement in cell.tree.body}
                own = [node for node in own if self._is_made_anew(node, edited, trained, is_edited=ast.dump(node) not in known)]
            program.append((cell.where.file, own, cell is latest))
        return _without_overwritten(program)

    @staticmethod
    def _texts(edits: Sequence[Edit]) -> dict[str, str]:
        """The source of each edited file, for whoever reads it during the trial."""
        edited = {edit.file for edit in edits}
        texts = {
            cell.where.file: _edited_text(cell, [edit for edit in edits if edit.file == cell.where.file])
            for cell in cells()
            if cell.where.file in edited
        }
        return {file: text for file, text in texts.items() if text is not None}

    def _is_made_anew(self, statement: ast.stmt, edited: set[str], trained: set[str], *, is_edited: bool) -> bool:
        """Whether a statement of an earlier cell runs again; the names that it makes join those of its kind."""
        made, read = bound_names(statement), read_names(statement)
        values = [self._space.get(name) for name in made]
        is_code = isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom))
        makes_trained = not is_code and any(isinstance(value, _TRAINED) or _is_leaf(value) for value in values)
        if isinstance(statement, (ast.For, ast.While)):  # a training of its own, or one that prepares data
            return is_edited
        follows = bool(read & trained) and any(_holds_trained(value) for value in values)
        fills = isinstance(statement, ast.Expr) and not made and (_changes(statement, trained) or _seeds(statement))
        if is_edited or (read & edited and made):
            edited |= made
        elif not (makes_trained or follows or fills):
            return False
        if makes_trained or follows:
            trained |= made
        return True

    def _put_back(self) -> None:
        for name in self._space.keys() - self._before.keys():
            del self._space[name]
        self._space.update(self._before)
        self._kept.put_back()


def _without_overwritten(program: list[tuple[str, list[ast.stmt], bool]]) -> list[tuple[str, list[ast.stmt], bool]]:
    """The program without statements whose names another one binds anew before they are read."""
    kept: list[tuple[str, list[ast.stmt], bool]] = []
    gone = set[str]()
    for file, statements, is_cell in reversed(program):
        own: list[ast.stmt] = []
        for statement in reversed(statements):
            changed = bound_names(statement) or ({root_of(statement.value)} if isinstance(statement, ast.Expr) else set())
            if is_cell or not changed <= gone:
                own.insert(0, statement)
                gone = (gone | bound_names(statement)) - read_names(statement)
        if own:
            kept.insert(0, (file, own, is_cell))
    return kept


@contextmanager
def _limited(until_s: float, until_wall_s: float) -> Iterator[None]:
    """Ends what goes on for too long at its next call of a Python function."""
    before = sys.gettrace()

    def trace(_frame: FrameType, _event: str, _arg: object) -> None:
        if clock_s() > until_s or time.monotonic() > until_wall_s:
            raise EnoughError(is_late=True)

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _tensors_of(value: Any) -> list[Any]:
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    return [state for state in getattr(value, "state", {}).values() if isinstance(state, Mapping)]


def _edited_tree(cell: Source, edits: Sequence[Edit]) -> ast.Module | None:
    text = _edited_text(cell, edits) if edits else None
    return cell.tree if not edits else None if text is None else parsed(text)


def _edited_text(cell: Source, edits: Sequence[Edit]) -> str | None:
    moved = [Edit(cell=edit.cell, file=edit.file, line=edit.line + cell.offset, old=edit.old, new=edit.new) for edit in edits]
    try:
        return applied("\n".join(cell.lines), moved)
    except (ValueError, IndexError):
        return None


@contextmanager
def _reading(texts: Mapping[str, str]) -> Iterator[None]:
    """Inside, the source of these files is another one: an instrument that reads it sees what runs."""
    before = {file: linecache.cache[file] for file in texts if file in linecache.cache}
    for file in before:
        text = texts[file]
        linecache.cache[file] = (len(text), None, [f"{line}\n" for line in text.split("\n")], file)
    try:
        yield
    finally:
        linecache.cache.update(before)


def _is_magic(statement: ast.stmt) -> bool:
    return any(isinstance(node.func, ast.Name) and node.func.id == "get_ipython" for node in nodes(ast.Call, statement))


def _is_leaf(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad


def _holds_trained(value: object) -> bool:
    return isinstance(value, _TRAINED) or any(tensor.requires_grad for tensor in tensors_in([value]))


def _is_seed(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and _seeds(statement)


def _seeds(statement: ast.Expr) -> bool:
    """Whether it is a call such as ``torch.manual_seed(0)``, from which models are drawn."""
    return "seed" in called(statement.value)


def _changes(statement: ast.Expr, trained: set[str]) -> bool:
    """Whether it calls a method of a model or an optimizer, or a function that fills its argument."""
    call = statement.value
    return bool(read_names(call) & trained) and (root_of(call) in trained or method(call).endswith(_FILLS))
