"""*Modified by an inplace operation*: the op that saved the tensor, and the line that overwrote it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.autograd.errors.raised import Raised, named_members, out_of_place, statement_at, writes_to
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.tape import RecordedOp, Use
from torchdebug_magics.probing.graphs import upstream
from torchdebug_magics.probing.source.call_sites import value_of
from torchdebug_magics.probing.syntax import method, nodes, tree_of
from torchdebug_magics.probing.where import excerpt, location
from torchdebug_magics.report import Location

_CHANGED = "modified by an inplace operation"
_MESSAGE = re.compile(r"\[[\w.]+ \[([\d, ]*)\]\](?:, which is output \d+ of (\S+?),)? is at version (\d+); expected version (\d+)")


class _Overwritten(NamedTuple):
    saver: RecordedOp
    saved: Use
    writer: RecordedOp
    written: Use


def modified_in_place(raised: Raised) -> AutogradFinding:
    """Names both ops: from the tape if the step was recorded, otherwise from the graph and the user's source."""
    found = next(_all_on_tape(raised), None)
    return _read_from_text(raised) if found is None else _from_tape(raised, found)


def _all_on_tape(raised: Raised) -> Iterator[_Overwritten]:
    """In the order in which backward() meets them."""
    complaint = Complaint.of(raised.message)
    savers = [(op, broken.complaint) for broken in broken_nodes(raised.roots) if (op := _op_of(raised, broken.node)) is not None]
    for op, said in sorted(savers, key=lambda one: -one[0].index):
        if (found := _overwritten(raised, op, said or complaint)) is not None:
            yield found


def _op_of(raised: Raised, node: object) -> RecordedOp | None:
    return raised.tape.by_node.get(node._sequence_nr())  # type: ignore[attr-defined]


def _overwritten(raised: Raised, saver: RecordedOp, complaint: Complaint | None) -> _Overwritten | None:
    uses = [*saver.makes, *saver.reads]
    if complaint is not None:
        uses = [use for use in uses if use.shape == complaint.shape] or uses
    for use in uses:
        for writer, written, version in raised.tape.writers(use, saver):
            if version > (use.version if complaint is None else complaint.expected):
                return _Overwritten(saver, use, writer, written)
    return None


def _from_tape(raised: Raised, found: _Overwritten) -> AutogradFinding:
    saver, writer = found.saver, found.writer
    name, is_member = _name(raised, found)
    where = writer.line.location if writer.line is not None else None
    saved_at = saver.line.location if saver.line is not None else None
    subject = f"`{name}`" if name else f"a {list(found.saved.shape)} tensor"
    return AutogradFinding(
        kind="inplace",
        raised=True,
        headline=f"{subject} was overwritten after `{saver.name}` saved it for backward",
        location=where,
        op=saver.name,
        saved_at=saved_at,
        writer_op=writer.name,
        tensor=name,
        module=writer.module if writer.module is not None else saver.module,
        parameters=(name,) if name and is_member else (),
        fix=_fix(raised, found, where),
        explanation=_why(found),
        excerpt=excerpt(where) if where is not None else (),
    )


def _name(raised: Raised, found: _Overwritten) -> tuple[str | None, bool]:
    """(name, whether it is that of a parameter or buffer)."""
    for name, member in named_members():
        if raised.memory_is(member, found.saved.memory):
            return name, True
    if found.writer.module is not None and not found.writer.in_optimizer and "forward" not in _function(found.writer):
        return None, False
    written = list(writes_to(statement)) if (statement := statement_at(found.writer.line.location if found.writer.line else None)) else []
    if written:
        return written[0], False
    return raised.name_of_memory({found.saved.memory}), False


def _function(op: RecordedOp) -> str:
    return op.line.function if op.line is not None else ""


def _why(found: _Overwritten) -> str:
    by = "the optimizer's update" if found.writer.in_optimizer else f"`{found.writer.name}`"
    return f"the derivative of `{found.saver.name}` needs the value that {by} overwrote"


def _fix(raised: Raised, found: _Overwritten, where: Location | None) -> str:
    writer = found.writer
    if writer.in_optimizer:
        sources = [one.source for one in _updates(raised)] or ["the optimizer's step()"]
        backward = raised.code or "backward()"
        return f"move {listed([f'`{one}`' for one in sources])} below `{backward}`, or compute the second loss again after the update"
    statement = statement_at(where)
    if statement is not None and (code := out_of_place(statement)):
        return f"`{code}`"
    if writer.module_type and writer.name.endswith("_"):
        name = f"module `{writer.module}`" if writer.module else "the module"
        return f"use `{writer.module_type}(inplace=False)` for {name}"
    if writer.module is not None and writer.module_type.startswith("BatchNorm"):
        return "run both inputs through the model in one batch, or call `.eval()` for the second forward"
    source = where.source if where is not None else "the write"
    return f"move `{source}` below the backward pass, or write into a copy (`.clone()`)"


def _updates(raised: Raised) -> list[Location]:
    """Of all optimizers that have overwritten what this graph had saved."""
    found = _all_on_tape(raised)
    lines = [one.writer.line.location for one in found if one.writer.in_optimizer and one.writer.line is not None]
    return sorted(set(lines), key=lambda one: one.line)


def _read_from_text(raised: Raised) -> AutogradFinding:
    """Without a tape: the variable whose version is the one that PyTorch complains of, and the writes to it in the text."""
    complaint = Complaint.of(raised.message)
    broken = next(broken_nodes(raised.roots), None)
    op = "" if broken is None else _plain_name(broken.node.name())
    name, where = None, None
    if complaint is not None:
        for variable, value in raised.variables():
            if _is_it(value, complaint):
                name = variable
                where = _write_of(raised, variable)
                if where is not None:
                    break
    if name is None and broken is not None and complaint is not None:
        name, where = _updated(raised, broken.node, complaint)
    statement = statement_at(where)
    code = out_of_place(statement) if statement is not None else ""
    if where is not None and where.source.endswith("step()"):
        code, fix = "", f"move `{where.source}` below `{raised.code}`, or compute this loss again after the update"
    else:
        fix = "put `%%autograd --every-step` above the cell and run the cell again: the report names the line that overwrites the tensor"
    subject = f"`{name}`" if name else (f"a {list(complaint.shape)} tensor" if complaint is not None else "a tensor")
    return AutogradFinding(
        kind="inplace",
        raised=True,
        headline=f"{subject} was overwritten after {f'`{op}`' if op else 'an op'} saved it for backward",
        location=where or raised.here,
        op=op or None,
        tensor=name,
        fix=f"`{code}`" if code else fix,
        explanation="" if where is None else "read from the graph and the source; `%%autograd` above the cell records the write itself",
        excerpt=excerpt(where) if where is not None else (),
    )


def _updated(raised: Raised, node: Any, complaint: Complaint) -> tuple[str | None, Location | None]:
    """(name, line) of the parameter that the node was given, of which it may have saved a transposed view, and of its update."""
    inputs = [one for one, _ in node.next_functions if one is not None]
    inputs += [one for inner in inputs for one, _ in inner.next_functions if one is not None]
    leaves = (one.variable for one in inputs if hasattr(one, "variable"))
    leaf = next((one for one in leaves if one._version == complaint.version and sorted(one.shape) == sorted(complaint.shape)), None)
    if leaf is None:
        return None, None
    name = next((name for name, member in named_members() if member is leaf), None) or raised.name_of(leaf)
    for frame, place in zip(raised.frames, raised.places, strict=True):
        steps = [call for call in nodes(ast.Call, tree_of(place.file)) if method(call) == "step" and call.lineno < place.line]
        for call in sorted(steps, key=lambda one: -one.lineno):
            optimizer = value_of(call.func.value, frame) if isinstance(call.func, ast.Attribute) else None
            if isinstance(optimizer, torch.optim.Optimizer) and any(
                one is leaf for group in optimizer.param_groups for one in group["params"]
            ):
                return name, location(place.file, call.lineno, place.function)
    return name, None


def _is_it(value: object, complaint: Complaint) -> bool:
    if not issubclass(type(value), torch.Tensor) or value.is_inference():  # type: ignore[attr-defined]
        return False
    return value._version == complaint.version > 0 and tuple(value.shape) == complaint.shape  # type: ignore[attr-defined]


def _plain_name(node: str) -> str:
    """``ExpBackward0`` -> ``exp``; ``NativeBatchNormBackward0`` -> ``native_batch_norm``."""
    stem = node.rpartition("::")[2].partition("Backward")[0]
    return "".join(f"_{char.lower()}" if char.isupper() and place else char.lower() for place, char in enumerate(stem))


def _write_of(raised: Raised, name: str) -> Location | None:
    """The last statement before the error that writes the variable in place, in the frames that see it."""
    for frame in raised.frames:
        simple = (one for one in nodes(ast.stmt, tree_of(frame.f_code.co_filename)) if not hasattr(one, "body"))
        lines = [one.lineno for one in simple if name in writes_to(one)]
        if lines:
            before = [line for line in lines if line <= frame.f_lineno]
            return location(frame.f_code.co_filename, max(before or lines), frame.f_code.co_name)
    return None


class Complaint(NamedTuple):
    """What PyTorch says of a tensor that was modified in place."""

    shape: tuple[int, ...]
    maker: str
    """The node that made it, such as ``"ExpBackward0"``; empty for a leaf."""
    version: int
    expected: int

    @classmethod
    def of(cls, message: str) -> Complaint | None:
        """None where the message holds no such thing."""
        found = _MESSAGE.search(message)
        if found is None:
            return None
        shape = tuple(int(size) for size in found[1].split(",") if size.strip())
        return cls(shape, found[2] or "", int(found[3]), int(found[4]))


class Broken(NamedTuple):
    """A node, and which of its saved tensors was modified."""

    node: Any
    attribute: str
    complaint: Complaint | None


def nodes_of(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes of their graphs; see `upstream` for how many."""
    return upstream(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)


def broken_nodes(tensors: Iterable[torch.Tensor]) -> Iterator[Broken]:
    """The nodes that hold a tensor which was modified after it was saved."""
    for node in nodes_of(tensors):
        for name in saved_names(node):
            if _CHANGED in (refused := _refused(node, name)):
                yield Broken(node, name, Complaint.of(refused))


def saved_names(node: Any) -> tuple[str, ...]:
    """The attributes under which a node hands out what it saved."""
    names = dir(type(node))
    tensors = [name.removeprefix("_raw") for name in names if name.startswith("_raw_saved_") and name.removeprefix("_raw") in names]
    return (*tensors, *(["saved_tensors"] if "saved_tensors" in names else []))


def is_packed(node: Any, name: str) -> bool:
    """Whether a hook has packed it, so that a look at it would run the user's code, as a checkpoint's forward."""
    try:
        raw = getattr(node, f"_raw{name}" if name.startswith("_saved") else f"_raw_{name}")
    except (AttributeError, RuntimeError):
        return False
    return any(getattr(one, "unpack_hook", None) is not None for one in (raw if isinstance(raw, (tuple, list)) else (raw,)))


def _refused(node: Any, name: str) -> str:
    if is_packed(node, name):
        return ""
    try:
        getattr(node, name)
    except RuntimeError as error:
        return str(error)
    return ""
