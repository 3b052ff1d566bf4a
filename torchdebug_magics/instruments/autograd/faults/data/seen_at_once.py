"""Faults that are seen as they happen: loaders without batches, or that nobody reads; a backward without its gradient."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from torchdebug_magics.format import listed, plural
from torchdebug_magics.instruments.autograd.faults.data.rewritten_items import StoredData
from torchdebug_magics.instruments.autograd.faults.data.seen_samples import SampleWatch, WorkersItems, at_loader
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding, statement_at, user_function
from torchdebug_magics.instruments.autograd.tape import RecordedOp, Tape, walk
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.names import user_names
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.edited_source import Source
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import (
    FUNCTIONS,
    SIMPLE,
    as_atom,
    bound_names,
    called,
    enclosing,
    exchanged,
    expression,
    last_name,
    nodes,
    read_names,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import is_user_code, local_values, location
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.report import Location

_FEW_BATCHES = 4


class LoaderWatch:
    """Looks at the batches that loaders give; keeps the first loader that has none."""

    def __init__(self, guard: Guard, line_here: Callable[[], Line | None], steps_count: Callable[[], int]) -> None:
        self._guard = guard
        self._line_here = line_here
        self._steps_count = steps_count
        self.empty: AutogradFinding | None = None
        self.repeated: AutogradFinding | None = None
        """The loader whose workers all give the same samples."""
        self.samples, self.stored, self._items = SampleWatch(), StoredData(), WorkersItems()
        self.batches_count = 0
        self.sizes: dict[Line, int] = {}
        """Samples in the first batch, by the line of the loop."""
        self._line: Line | None = None
        """Of the loop over that."""
        self._batches: dict[Line, list[int]] = {}
        """By the line of a loop: how many updates there were, at each of its first batches."""

    def around(self, original: Callable[[_BaseDataLoaderIter], Any], iterator: _BaseDataLoaderIter) -> Any:
        """A loader is asked for a batch."""
        __tracebackhide__ = True
        if iterator._num_yielded == 0:
            self._guard.run("the look at stored data", self.stored.meet, iterator)
        try:
            batch = original(iterator)
        except StopIteration:
            if self.empty is None and iterator._num_yielded == 0 and iterator._dataset_kind == _DatasetKind.Map:
                self._guard.run("the look at an empty loader", self._meet, iterator)
            if _is_copied(iterator):
                self.repeated = self.repeated or self._guard.run("the look at samples", self._items.finding, iterator, self._line_here())
            raise
        if _is_copied(iterator):
            self._guard.run("the look at samples", self._items.meet, iterator, batch)
        self.batches_count += 1
        if self.empty is not None and self._line is self._line_here():
            self.empty = None  # another loader there has batches: that one has none may be meant
        line = self._line_here()
        if line is not None and line not in self.sizes:
            self.sizes[line] = next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 0)
        if line is not None and len(counts := self._batches.setdefault(line, [])) < _FEW_BATCHES:
            counts.append(self._steps_count())
        looped = _name(None if line is None else line.location)
        self._guard.run("the look at samples", self.samples.meet, line, looped, iterator, batch, self._steps_count())
        return batch

    def unread_batches(self) -> AutogradFinding | None:
        """The loop over a loader that trains, and reads no input that the loader gives."""
        full = [(line, counts) for line, counts in self._batches.items() if len(counts) == _FEW_BATCHES]
        trained = [line for line, counts in full if all(map(int.__lt__, counts, counts[1:]))]
        return next(filter(None, map(_unread, trained)), None)

    def _meet(self, iterator: Any) -> None:
        self._line = self._line_here()
        sampler, count = iterator._index_sampler, len(iterator._dataset)
        size = getattr(sampler, "batch_size", None) or 0  # of a sampler of the user's, which makes the batches, nothing is known
        is_too_few = bool(getattr(sampler, "drop_last", False)) and 0 < count < size
        looped = None if self._line is None else self._line.location
        name, held = _name(looped), plural(count, "sample")
        dropped = f"{held} are less than one batch of {size}, and `drop_last=True` drops them"
        empty = "look at what selects the samples, the dataset or its sampler: the loop over it does nothing"
        self.empty = at_loader(
            "no_batches",
            name,
            looped,
            f"`{name or 'the loader'}` gives no batch: {dropped if is_too_few else f'it has {held}'}",
            f"pass a `batch_size` of at most {count}, or `drop_last=False`" if is_too_few else empty,
            option=("drop_last", None) if is_too_few else None,
            explanation="a loop over an empty loader ends at once, and raises nothing",
            is_hint=not is_too_few,
        )


def _is_copied(iterator: _BaseDataLoaderIter) -> bool:
    """Whether each of several workers has a copy of a data set that is read from its beginning to its end."""
    return iterator._dataset_kind == _DatasetKind.Iterable and iterator._num_workers > 1


def _unread(line: Line) -> AutogradFinding | None:
    """The variables of the loop at a line that nothing reads, where tensors of the same kind are read in their place."""
    where = line.location
    tree = tree_of(where.file)
    source = None if tree is None else Source(where, tree)
    loop = None if source is None else source.statement
    if source is None or not isinstance(loop, ast.For):
        return None
    given = [node.id for node in nodes(ast.Name, loop.target) if not node.id.startswith("_")]
    tensors = {name: value for name, value in user_names(sys._getframe()) if isinstance(value, torch.Tensor)}
    missed = [name for name in given if name in tensors]
    # A function that is called in the loop, such as a closure, may read them, too.
    read = read_names(*loop.body, *nodes(FUNCTIONS, tree))
    others = {node.id for node in nodes(ast.Name, *loop.body)} & tensors.keys() - bound_names(loop)
    alike = [(other, name) for other in sorted(others) for name in missed if _is_alike(tensors[other], tensors[name])]
    instead = dict(alike)
    if not missed or read & set(given) & tensors.keys() or not len(instead) == len(alike) == len(missed):
        return None
    fixed = [
        source.replacing(statement, ast.unparse(exchanged(statement, lambda node: _renamed(node, instead))))
        for statement in nodes(ast.stmt, *loop.body)
        if isinstance(statement, SIMPLE) and instead.keys() & read_names(statement)
    ]
    listing, loader = listed([f"`{name}`" for name in missed]), _name(where) or "the loader"
    return finding(
        "unread_batches",
        f"the loop over `{loader}` never reads {listing}",
        where,
        f"use {listing} in the loop, in the place of {listed([f'`{name}`' for name in instead])}",
        edits=source.merged(fixed),
        tensor=missed[0],
        explanation="each update is computed from the same numbers, whatever batch the loader gives",
    )


def _is_alike(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether both are batches of the same kind of thing."""
    return other is not None and tensor.dtype is other.dtype and tensor.dim() > 0 and tensor.shape[1:] == other.shape[1:]


def _renamed(node: ast.AST, names: dict[str, str]) -> ast.Name | None:
    return ast.Name(names[node.id], node.ctx) if isinstance(node, ast.Name) and node.id in names else None


def _name(where: Location | None) -> str:
    """What the loop, or the call of ``next()``, at that line calls its loader."""
    around = (
        [] if where is None else [node for node in enclosing(tree_of(where.file), where.line) if isinstance(node, (ast.For, ast.AsyncFor))]
    )
    over = around[-1].iter if around else next((call for call in nodes(ast.Call, statement_at(where)) if called(call) == "next"), None)
    while isinstance(over, ast.Call) and over.args:  # as in `enumerate(loader)` and `next(iter(loader))`
        over = over.args[0]
    return last_name(over)


class OwnFunctions:
    """Looks at the first call of each function's backward, by a hook on its node that takes itself off."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._met: set[type] = set()
        self._handles: list[Any] = []
        self.wrong: list[AutogradFinding] = []

    def meet(self, node: Any, tape: Tape, frame: FrameType | None) -> None:
        """An op is about to run in the backward of a node, called from that frame or from one that it calls."""
        function = getattr(type(node), "_forward_cls", None)
        if function is None or function in self._met:
            return
        self._met.add(function)
        code = getattr(inspect.unwrap(function.backward), "__code__", None)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if frame is None or code is None or not is_user_code(code):
            return
        # A hook on a node that runs already is given no gradients; before its first op the function still has them all.
        arguments = code.co_varnames[1 : code.co_argcount + bool(code.co_flags & inspect.CO_VARARGS)]
        incoming = list(tensors_in(list(local_values(frame, frozenset(arguments)).values())))
        first = tape.count

        def returned(made: tuple[Any, ...], _: object) -> None:
            handle.remove()
            self._guard.run("the look at a backward", self._look, function, made, incoming, tape, first)
            incoming.clear()

        handle = node.register_hook(returned)
        self._handles.append(handle)

    def off(self) -> None:
        """Take off the hooks on nodes that raised."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _look(self, function: Any, made: tuple[Any, ...], incoming: list[torch.Tensor], tape: Tape, first: int) -> None:
        gradients = [gradient for gradient in made if gradient is not None]
        with modes_aside(), torch.no_grad():
            if not incoming or all(bool((one == one.flatten()[:1]).all()) for one in incoming if one.numel()):
                return  # as at the end of a graph, where it is 1
        if gradients and not _depends(tape, gradients, {tape.numbers.of(one) for one in incoming}, first):
            is_factor = any(gradient.shape == one.shape for gradient in gradients for one in incoming)
            self.wrong.append(_wrong_backward(function, is_factor=is_factor))


def _depends(tape: Tape, gradients: Iterable[torch.Tensor], incoming: set[int], first: int) -> bool:
    """Whether the gradients were computed from those that came in, or may have been.

    That is where no op is seen to have made one, and where one lies in memory that was only allocated or set to a constant: what fills
    that may be a kernel that no dispatcher sees.
    """
    origins = [tape.origin(id(gradient)) for gradient in gradients]
    makers = [maker for maker in origins if maker is not None and maker.index >= first]
    if len(makers) < len(origins):
        return True

    def may_depend(op: RecordedOp) -> bool:
        is_filled_unseen = not op.reads or op.name.startswith(("empty", "new_", "zeros", "ones", "full"))
        return is_filled_unseen or op.unknown or any(use.memory in incoming or not use.memory for use in op.reads)

    return any(map(may_depend, walk(makers, lambda op: [maker for maker in op.parents if maker.index >= first])))


def _wrong_backward(function: Any, *, is_factor: bool) -> AutogradFinding:
    """At the line that returns; `is_factor`: what it returned and what it was given have one shape."""
    backward = inspect.unwrap(function.backward)
    code, returns = backward.__code__, list(nodes(ast.Return, user_function(backward)))
    given = list(inspect.signature(backward).parameters)[1:2]
    line = returns[-1].lineno if returns else code.co_firstlineno
    where, name = location(code.co_filename, line, code.co_name), given[0] if given else "grad_output"
    value, fix = returns[-1].value if len(returns) == 1 else None, f"multiply what it returns by `{name}`"
    if is_factor and value is not None and not isinstance(value, ast.Tuple):
        fix = f"`return {ast.unparse(ast.BinOp(ast.Name(name), ast.Mult(), expression(as_atom(value))))}`"
    return finding(
        "wrong_backward",
        f"`{function.__name__}.backward` ignores `{name}`",
        where,
        fix,
        tensor=name,
        explanation="by the chain rule, the gradient of an input is that of the output times the derivative; "
        "what comes after the function does not influence what is trained",
    )
