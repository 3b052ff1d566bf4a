"""*Modified by an inplace operation*: the op that saved the tensor, and the line that overwrote it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.autograd.errors.raised import Raised
from torchdebug_magics.instruments.autograd.errors.second_backward import carried_graphs, carried_over
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import (
    code_at,
    loop_around,
    named_members,
    not_in_place,
    out_of_place,
    statement_at,
    writes,
    written_names,
)
from torchdebug_magics.instruments.autograd.tape import Backward, RecordedOp, Use
from torchdebug_magics.probing.graphs import saved_by, upstream
from torchdebug_magics.probing.source.call_sites import value_of
from torchdebug_magics.probing.source.edited_source import SIMPLE, Source, cells, made_as
from torchdebug_magics.probing.source.syntax import (
    bound_names,
    called,
    covers,
    exchanged,
    expression,
    loops_around,
    method,
    nodes,
    parsed,
    read_names,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.probing.steps import parameters_of
from torchdebug_magics.report import Edit, Location

_CHANGED = "modified by an inplace operation"
_MESSAGE = re.compile(r"\[[\w.]+ \[([\d, ]*)\]\](?:, which is output \d+ of \S+?,)? is at version (\d+); expected version (\d+)")


def modified_in_place(raised: Raised) -> AutogradFinding:
    """Names both ops: from the tape if the step was recorded, otherwise from the graph and the user's source."""
    overwritten = list(_all_on_tape(raised))
    if _is_of_an_earlier_round(raised, overwritten) and (names := [name for name, _ in carried_graphs(raised)]):
        why = "the update overwrote what that graph had saved: `retain_graph=True` keeps the graph, and is not needed without it"
        return carried_over(raised, names, why=why)
    return _from_tape(raised, overwritten) if overwritten else _read_from_text(raised)


def _is_of_an_earlier_round(raised: Raised, overwritten: list[tuple[RecordedOp, Use, RecordedOp]]) -> bool:
    """Whether a graph that ``retain_graph=True`` keeps is from before an earlier backward pass of the same line, and an update came after.

    Without a tape, this is so where the loop has no other backward pass.
    """
    if not any(option.arg == "retain_graph" for call in nodes(ast.Call, raised.statement) for option in call.keywords):
        return False
    loop, here = loop_around(raised.here), raised.here
    if not overwritten:
        return loop is not None and sum(method(call) == "backward" for call in nodes(ast.Call, loop)) == 1
    lines = [(event.index, event.where) for event in raised.course.events if isinstance(event, Backward) and not event.failed]
    latest = max((index for index, where in lines if where is not None and here is not None and where.line == here.line), default=-1)
    return all(writer.in_optimizer and saver.index < latest for saver, _, writer in overwritten)


def _all_on_tape(raised: Raised) -> Iterator[tuple[RecordedOp, Use, RecordedOp]]:
    """(saver, what it saved, writer) in the order in which backward() meets them."""
    whole = Complaint.of(raised.message)
    savers = [(op, said or whole) for node, said in broken_nodes(raised.roots) if (op := raised.tape.nodes.of(node._sequence_nr()))]
    for saver, complaint in sorted(savers, key=lambda saver: -saver[0].index):
        uses = [*saver.makes, *saver.reads]
        uses = [use for use in uses if complaint is not None and use.shape == complaint.shape] or uses
        writes = ((use, writer, version) for use in uses for writer, version in raised.tape.writers(use, saver))
        later = (write for write in writes if write[2] > (write[0].version if complaint is None else complaint.expected))
        if (first := next(later, None)) is not None:
            yield saver, first[0], first[1]


def _from_tape(raised: Raised, overwritten: list[tuple[RecordedOp, Use, RecordedOp]]) -> AutogradFinding:
    saver, saved, writer = overwritten[0]
    member = next((name for name, tensor in named_members() if raised.tape.numbers.of(tensor) == saved.memory != 0), None)
    name, statement = member, statement_at(writer.where)
    tree = parsed(writer.source)
    here = [each for each in (tree.body if tree is not None else ()) if any(op == writer.name for _, op in writes(each))]
    statement = here[0] if len(here) == 1 else statement
    is_inside = writer.module is not None and not writer.in_optimizer and "forward" not in (writer.where.function if writer.where else "")
    if member is None and not is_inside:  # else the user's line only calls the module that writes
        name = next(iter(written_names(statement)), None) or raised.name_of_memory(saved.memory)
    fix = f"move `{code_at(writer.where, statement=statement) or 'the write'}` below the backward pass, or write into a copy (`.clone()`)"
    where, edits = writer.where, tuple[Edit, ...]()
    if writer.in_optimizer:
        where, fix, edits = _in_order(raised, saver, [op for _, _, op in overwritten if op.in_optimizer])
    elif code := out_of_place(statement, writer.where):
        fix = f"`{code}`"
    elif writer.module_type and writer.name.endswith("_"):
        fix = f"use `{writer.module_type}(inplace=False)` for {f'module `{writer.module}`' if writer.module else 'the module'}"
        edits = _made_out_of_place(writer.module_type)
    elif writer.module is not None and writer.module_type.startswith("BatchNorm"):
        fix = "run both inputs through the model in one batch, or call `.eval()` for the second forward"
    by = "the optimizer's update" if writer.in_optimizer else f"`{writer.name}`"
    return raised.finding(
        f"{f'`{name}`' if name else f'a {list(saved.shape)} tensor'} was overwritten after `{saver.name}` saved it for backward",
        "" if edits else fix,
        where,
        fix=fix,
        edits=edits,
        op=saver.name,
        saved_at=saver.where,
        writer_op=writer.name,
        tensor=name,
        module=writer.module if writer.module is not None else saver.module,
        parameters=(member,) if member else (),
        explanation=f"the derivative of `{saver.name}` needs the value that {by} overwrote",
    )


def _in_order(raised: Raised, saver: RecordedOp, writers: list[RecordedOp]) -> tuple[Location | None, str, tuple[Edit, ...]]:
    """(the update that came too early, how it comes late enough), in the innermost function that the writes and the failing call share.

    There the update can go below the call, unless what stands between needs what it binds, or both are in a loop that does not compute
    the loss anew, or in which the call of the next round comes after the update of this one.
    """
    lasting = [place for _, place in reversed(raised.frames)]
    pairs = [pair for writer in writers if (pair := _parting(writer, lasting)) is not None]
    if not pairs:
        update = writers[0].where
        return update, f"compute the loss again after `{code_at(update)}`, before `{raised.code or 'backward()'}`", ()
    call = pairs[0][1]
    updates = sorted({update for update, other in pairs if other == call}, key=lambda update: update.line)
    first, tree, made = updates[0], tree_of(call.file), _parting(saver, lasting)
    between = [node for node in nodes(ast.stmt, tree) if first.line < node.lineno <= call.line and not hasattr(node, "body")]
    loops = [loop for loop in loops_around(tree, first.line) if covers(loop, call.line)]
    is_new = made is not None and all(covers(loop, made[0].line) for loop in loops)
    bound = {name for update in updates if (statement := statement_at(update)) is not None for name in bound_names(statement)}
    if first.line < call.line and is_new and not bound & read_names(*between):
        moved = listed([f"`{code_at(update)}`" for update in updates])
        alone = _of_its_own(raised, first, call)
        if alone is None or len(updates) > 1:
            return first, f"move {moved} below `{code_at(call)}`, or compute the second loss again after the update", ()
        if alone[1]:
            return first, f"move {moved} below `{code_at(call)}`, and write {alone[0]}", alone[1]
    return first, f"compute the loss of `{code_at(call)}` after `{code_at(updates[-1])}`", ()


def _of_its_own(raised: Raised, update: Location, call: Location) -> tuple[str, tuple[Edit, ...]] | None:
    """A backward pass with gradients for the optimizers alone that step next, and the update below it; None where no other one steps.

    Else the update would also follow the gradients of this loss, which may be the opposite, as of a generator's.
    """
    tree = tree_of(call.file)
    backward, early = statement_at(call), statement_at(update)
    source = Source(call, tree) if tree is not None else None
    block = source.block_of(backward) if source is not None else []
    later = block[block.index(backward) + 1 :] if backward in block else []
    steps = [
        ast.unparse(node.func.value) for node in nodes(ast.Call, *later) if method(node) == "step" and isinstance(node.func, ast.Attribute)
    ]
    is_alone = source is not None and all(len(source.beside(each)) == 1 for each in (backward, early) if each is not None)
    if not is_alone or not isinstance(backward, ast.Expr) or not isinstance(early, ast.Expr) or not isinstance(backward.value, ast.Call):
        return "", ()
    function = early.value.func if isinstance(early.value, ast.Call) and method(early.value) == "step" else None
    name = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    if not steps or {name} == set(steps):
        return None  # or the same one, which is to follow both
    every = [part for each in steps for part in _parameters_of(call.file, each)]
    optimizers = [raised.value(each) for each in (name, *steps)]
    parameters = [set(map(id, parameters_of(each))) for each in optimizers if isinstance(each, torch.optim.Optimizer)]
    are_apart = len(parameters) == len(optimizers) and parameters[0].isdisjoint(*parameters[1:])
    if source is None or not all(_parameters_of(call.file, each) for each in steps) or not are_apart:
        return "", ()  # what both update would follow this loss alone, as it is set to zero before
    own = ast.keyword("inputs", expression(f"list({every[0].removeprefix('*')})" if len(every) == 1 else f"[{', '.join(every)}]"))
    new = ast.unparse(ast.Call(backward.value.func, backward.value.args, [*backward.value.keywords, own]))
    edits = (source.replacing(early, ""), source.replacing(backward, f"{new}\n{ast.unparse(early)}"))
    return f"`{new}`", source.merged(edits)


def _parameters_of(file: str, optimizer: str) -> list[str]:
    """``*net.parameters()`` for each part that an optimizer is made with; empty where it is made with anything else."""
    given = next((made.args[0] for _, made in made_as(file, optimizer)[:1] if made.args), None)
    parts = given.elts if isinstance(given, ast.List) else [ast.Starred(given, ast.Load())] if given is not None else []
    texts = [ast.unparse(part) for part in parts if isinstance(part, ast.Starred) and method(part.value) == "parameters"]
    return texts if len(texts) == len(parts) else []


def _parting(op: RecordedOp, lasting: list[Location]) -> tuple[Location, Location] | None:
    """Of the calls in which an op ran, and those that last, the outermost first: the lines where they part, in one function."""
    calls = [line.location for line in reversed(op.calls)]
    # Of both, the outermost calls may be missing: those around the cell, and those of a deep stack.
    starts = [*((calls[place:], lasting) for place in range(len(calls))), *((calls, lasting[place:]) for place in range(len(lasting)))]
    aligned = next((start for start in starts if all(start) and _is_same_function(start[0][0], start[1][0])), ([], []))
    pair = next((pair for pair in zip(*aligned, strict=False) if pair[0] != pair[1]), None)
    return pair if pair is not None and _is_same_function(*pair) else None


def _is_same_function(where: Location, other: Location) -> bool:
    return (where.file, where.function) == (other.file, other.function)


def _read_from_text(raised: Raised) -> AutogradFinding:
    """Without a tape: the variable whose version is the one that PyTorch complains of, and the writes to it in the text."""
    complaint = Complaint.of(raised.message)
    node = next((node for node, _ in broken_nodes(raised.roots)), None)
    kind = "" if node is None else node.name().rpartition("::")[2].partition("Backward")[0]  # as in `NativeBatchNormBackward0`
    op = re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower().replace("copy_slices", "copy")
    name, where = None, None
    for variable, value in raised.variables() if complaint is not None else ():
        if complaint is not None and complaint.is_of(value):
            name, where = variable, _write_of(raised, variable)
            if where is not None:
                break
    if name is None and node is not None and complaint is not None:
        name, where = _updated(raised, node, complaint)
    magic = "%%autograd --every-step" if raised.course.backward_count else "%%torchdebug"
    fix = f"put `{magic}` above the cell and run the cell again: the report names the line that overwrites the tensor"
    if where is not None and where.source.endswith("step()"):
        fix = f"move `{where.source}` below `{raised.code}`, or compute this loss again after the update"
    elif code := out_of_place(statement_at(where), where):
        fix = f"`{code}`"
    subject = f"`{name}`" if name else (f"a {list(complaint.shape)} tensor" if complaint is not None else "a tensor")
    return raised.finding(
        f"{subject} was overwritten after {f'`{op}`' if op else 'an op'} saved it for backward",
        fix,
        where,
        op=op or None,
        tensor=name,
        explanation="" if where is None else "read from the graph and the source; `%%torchdebug` above the cell records the write itself",
    )


def _updated(raised: Raised, node: Any, complaint: Complaint) -> tuple[str | None, Location | None]:
    """(name, line) of the parameter that the node was given, of which it may have saved a transposed view, and of its update."""
    inputs = [before for before, _ in node.next_functions if before is not None]
    inputs += [before for inner in inputs for before, _ in inner.next_functions if before is not None]
    leaves = (node.variable for node in inputs if hasattr(node, "variable"))
    leaf = next((leaf for leaf in leaves if leaf._version == complaint.version and sorted(leaf.shape) == sorted(complaint.shape)), None)
    if leaf is None:
        return None, None
    name = next((name for name, member in named_members() if member is leaf), None) or raised.name_of(leaf)
    for frame, place in raised.frames:
        steps = [call for call in nodes(ast.Call, tree_of(place.file)) if method(call) == "step" and call.lineno < place.line]
        for call in sorted(steps, key=lambda step: -step.lineno):
            optimizer = value_of(call.func.value, frame) if isinstance(call.func, ast.Attribute) else None
            groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ()
            if any(tensor is leaf for group in groups for tensor in group["params"]):
                return name, location(place.file, call.lineno, place.function)
    return name, None


def _write_of(raised: Raised, name: str) -> Location | None:
    """The last statement before the error that writes the variable in place, in the frames that see it."""
    for _, place in raised.frames:
        simple = (node for node in nodes(ast.stmt, tree_of(place.file)) if not hasattr(node, "body"))
        lines = [node.lineno for node in simple if name in written_names(node)]
        if lines:
            return location(place.file, max([line for line in lines if line <= place.line] or lines), place.function)
    return None


class Complaint(NamedTuple):
    """What PyTorch says of a tensor that was modified in place."""

    shape: tuple[int, ...]
    version: int
    expected: int

    @classmethod
    def of(cls, message: str) -> Complaint | None:
        """None where the message holds no such thing."""
        match = _MESSAGE.search(message)
        if match is None:
            return None
        return cls(tuple(int(size) for size in match[1].split(",") if size.strip()), int(match[2]), int(match[3]))

    def is_of(self, value: Any) -> bool:
        """Whether a variable holds the tensor."""
        if not issubclass(type(value), torch.Tensor) or value.is_inference():  # asked of the type, so that no lazy proxy is woken
            return False
        return bool(value._version == self.version > 0) and tuple(value.shape) == self.shape


def nodes_of(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes of their graphs; see `upstream` for how many."""
    return upstream(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)


def broken_nodes(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[Any, Complaint | None]]:
    """The nodes that hold a tensor which was modified after it was saved, and what PyTorch says of it."""
    for node in nodes_of(tensors):
        for _, saved in saved_by(node):
            if isinstance(saved, str) and _CHANGED in saved:
                yield node, Complaint.of(saved)


def _made_out_of_place(kind: str) -> tuple[Edit, ...]:
    """The modules of a class that work in place, made without that option, wherever the cells make them."""
    edits: list[Edit] = []
    for source in cells():
        for statement in [node for node in nodes(ast.stmt, source.tree) if isinstance(node, SIMPLE)]:
            new = exchanged(statement, lambda node: not_in_place(node) if isinstance(node, ast.Call) and called(node) == kind else None)
            if ast.unparse(new) != ast.unparse(statement):
                edits += source.merged((source.replacing(statement, ast.unparse(new)),))
    return tuple(edits)
