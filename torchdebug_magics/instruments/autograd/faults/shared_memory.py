"""What was kept of a model before its updates, and shares memory with its parameters: each update changes both."""

from __future__ import annotations

import ast
import copy
import sys
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import assigned_at, finding, statement_at
from torchdebug_magics.instruments.autograd.tape import RecordedOp
from torchdebug_magics.probing.names import user_names
from torchdebug_magics.probing.source.call_sites import value_of
from torchdebug_magics.probing.source.edited_source import Source, statements
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import as_atom, called, exchanged, expression, method, nodes, targets_of, tree_of
from torchdebug_magics.probing.source.user_code import local_values
from torchdebug_magics.probing.state.attributes import attributes_of
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.report import Edit, Location

_MOST_STATES = 64
_FEWEST_ENTRIES = 3
_CHANGES = frozenset({"append", "clear", "extend", "insert", "pop", "update", "add", "remove", "sort", "fill"})
_COPIED_STATE = "{{name: value.clone() for name, value in {}.items()}}"
_COPIES = {kind.__name__: f"{kind.__name__}({{}})" for kind in (list, dict, set, deque)}
"""Of what changes in place, and is no tensor."""
_WHY = "`state_dict()`, `.data` and `list(model.parameters())` copy nothing: an optimizer writes into the same memory"


class _Taken(NamedTuple):
    """A state that the user's code has asked for."""

    state: weakref.ref[Any]
    line: Line | None
    steps_count: int
    """Of all optimizers, before."""


class Restored(NamedTuple):
    """A state that was loaded into the parameters whose memory it shares, after updates."""

    taken: Line
    loaded: Line | None


class KeptStates:
    """The states that ``state_dict()`` returned, as long as the user's code holds them."""

    def __init__(self) -> None:
        self._taken: list[_Taken] = []
        self.restored: Restored | None = None

    def take(self, state: Any, line: Line | None, steps_count: int) -> None:
        """``state_dict()`` has returned that, after so many updates."""
        alive = [one for one in self._taken if one.state() is not None]
        self._taken = [*alive[-_MOST_STATES:], _Taken(weakref.ref(state), line, steps_count)]

    def load(self, module: torch.nn.Module, state: Any, line: Line | None, updated: set[int], steps_count: int) -> None:
        """``load_state_dict(state)`` is called; `updated` are the ids of what an optimizer updates."""
        taken = next((one for one in self._taken if one.state() is state), None)
        if taken is None or taken.line is None or taken.steps_count == steps_count or not isinstance(state, Mapping):
            return
        moved = {name: one for name, one in module.named_parameters() if id(one) in updated}
        if moved and all(name in state and memory_of(state[name]) == memory_of(one) != 0 for name, one in moved.items()):
            self.restored = Restored(taken.line, line)


class Comparison(NamedTuple):
    """An op that gives the same for every value, as both of its tensors are one memory under two names."""

    op: RecordedOp
    names: tuple[str, ...]


def names_compared(op: RecordedOp, func: Any, given: tuple[Any, Any], frame: FrameType) -> tuple[str, ...]:
    """The names under which an op that is about to run is given one memory twice; empty where it has one name, or the result varies."""
    tensors = tensors_in(given)
    statement = statement_at(op.where)
    first = next(iter(tensors))
    names: list[str] = []
    for node in nodes((ast.Name, ast.Attribute), statement):
        value = value_of(node, frame, local_values(frame))
        if isinstance(value, torch.Tensor) and memory_of(value) == memory_of(first) and value.shape == first.shape:
            names.append(ast.unparse(node))
    names = list(dict.fromkeys(names))
    return tuple(names) if len(names) > 1 and any(name.isidentifier() for name in names) and _is_constant(func, given) else ()


def _is_constant(func: Any, given: tuple[Any, Any]) -> bool:
    """Whether the op gives the same for any two values that its tensors, which are one, might have: asked of the op itself."""
    results = []
    for value in (0.5, 2.0):
        args, kwargs = tree_map(lambda one, value=value: torch.full_like(one, value) if isinstance(one, torch.Tensor) else one, given)
        with _disable_current_modes(), torch.no_grad():
            results.append(func(*args, **kwargs))
    first, second = results
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


class Repeated(NamedTuple):
    """A list in which each entry is the same object, or the same memory, that is written between the entries."""

    where: Location
    holder: str
    entry: ast.expr
    kind: str
    """What an entry is: a tensor, the state of a model, or the name of its type."""
    entries_count: int


def repeated_entries(file: str, written: Container[int], number_of: Callable[[torch.Tensor], int]) -> Iterator[Repeated]:
    """What ``holder.append(entry)`` has put into lists that are alive; `written` are the numbers of memories that an op wrote."""
    texts: set[str] = set()
    appends: list[tuple[Location, ast.expr, ast.expr]] = []
    for where, statement in statements(file):
        texts.update(ast.unparse(node.func.value) for node in nodes(ast.Call, statement) if method(node) in _CHANGES)  # type: ignore[attr-defined]
        texts.update(ast.unparse(target.value) for target in targets_of(statement) if isinstance(target, ast.Subscript))
        match statement:
            case ast.Expr(ast.Call(ast.Attribute(holder, "append"), [entry])):
                appends.append((where, holder, entry))
    for where, holder, entry in appends:
        for values in _lists_called(holder):
            places = {_place(value, number_of) for value in values}
            place = next(iter(places)) if len(places) == 1 else None
            if place is not None and (ast.unparse(entry) in texts if place[0] == "object" else place[1] in written):
                kind = "tensor" if isinstance(values[0], torch.Tensor) else "state" if place[0] == "memory" else type(values[0]).__name__
                yield Repeated(where, ast.unparse(holder), entry, kind, len(values))
                break


def _lists_called(holder: ast.expr) -> Iterator[list[Any]]:
    """The lists of several entries that a variable, or an attribute of an object in a variable, may stand for."""
    for variable in user_names(sys._getframe(1)):
        value: Any = variable.value
        if isinstance(holder, ast.Attribute):
            value = (attributes_of(value) or {}).get(holder.attr)
        elif not isinstance(holder, ast.Name) or variable.name.partition(" in ")[0] != holder.id:
            continue
        if type(value) in {list, deque} and len(value) >= _FEWEST_ENTRIES:
            yield list(value)


def _place(entry: Any, number_of: Callable[[torch.Tensor], int]) -> tuple[str, int, object] | None:
    """Where the values of an entry are; None for what cannot change, or is a part of a model."""
    tensor = next(tensors_in(entry), None) if isinstance(entry, (torch.Tensor, dict)) else None
    if tensor is not None:
        return "memory", number_of(tensor), (tensor.storage_offset(), tuple(tensor.shape))
    return ("object", id(entry), None) if type(entry).__name__ in _COPIES else None


def repeated_finding(lists: Sequence[Repeated]) -> AutogradFinding:
    """The lists, at the line that appends to the first."""
    first, codes, edits = lists[0], list[str](), list[Edit]()
    for each in lists:
        copied = _COPIES.get(each.kind, _COPIED_STATE if each.kind == "state" else "{}.detach().clone()").format(ast.unparse(each.entry))
        codes.append(f"{each.holder}.append({copied})")
        source = Source(each.where, tree) if (tree := tree_of(each.where.file)) is not None else None
        if source is not None and source.statement is not None:
            edits.append(source.replacing(source.statement, codes[-1]))
    one = {"state": "memory", "tensor": "memory"}.get(first.kind, first.kind)
    return finding(
        "shared_memory",
        f"all {first.entries_count} entries of `{first.holder}` are one {one}",
        first.where,
        " and ".join(f"`{code}`" for code in codes),
        edits=tuple(edits),
        fix_state="compiles" if edits else "advice",
        tensor=first.holder,
        explanation=f"`append` keeps `{ast.unparse(first.entry)}` itself, and no copy: what changes it afterwards changes each entry",
    )


def restored_finding(restored: Restored) -> AutogradFinding:
    """A state that restores nothing."""
    where = restored.taken.location
    code = _with_copied_state(statement_at(where))
    return finding(
        "shared_memory",
        "`load_state_dict()` restores nothing: what it is given shares memory with the parameters",
        where,
        f"`{code}`" if code else "copy what `state_dict()` returns: `copy.deepcopy(model.state_dict())`",
        saved_at=restored.loaded.location if restored.loaded is not None else None,
        explanation=_WHY,
    )


def comparison_finding(comparison: Comparison, files: Iterable[str]) -> AutogradFinding:
    """A comparison of a parameter with itself, at the line that should have made the copy."""
    made = [(where, name) for name in comparison.names if (where := assigned_at(name, files, comparison.op.where)) is not None]
    where, name = min(made, key=lambda one: one[0].line) if made else (comparison.op.where, comparison.names[0])
    code = _with_copied_value(statement_at(where)) if made else ""
    return finding(
        "shared_memory",
        f"{' and '.join(f'`{name}`' for name in comparison.names[:2])} are one memory: the comparison is the same whatever an update did",
        where,
        f"`{code}`" if code else f"keep a copy: `{name}.clone()` where `{name}` is taken",
        op=comparison.op.name,
        tensor=name,
        saved_at=comparison.op.where,
        explanation=_WHY,
    )


def _with_copied_state(statement: ast.stmt | None) -> str:
    def copied(node: ast.AST) -> ast.AST | None:
        is_state = isinstance(node, ast.Call) and called(node) == "state_dict"
        return expression(_COPIED_STATE.format(ast.unparse(node))) if is_state else None

    return "" if statement is None or hasattr(statement, "body") else ast.unparse(exchanged(statement, copied))


def _with_copied_value(statement: ast.stmt | None) -> str:
    """An assignment with a copy of its value: of a list of parameters, with a copy of each."""
    if not isinstance(statement, ast.Assign):
        return ""
    changed = copy.deepcopy(statement)
    match changed.value:
        case ast.ListComp() as each:
            each.elt = _copied(each.elt)
        case ast.DictComp() as each:
            each.value = _copied(each.value)
        case ast.Call(ast.Name("list"), [source]):
            changed.value = expression(f"[p.detach().clone() for p in {ast.unparse(source)}]")
        case value:
            changed.value = _copied(value)
    return ast.unparse(changed)


def _copied(value: ast.expr) -> ast.expr:
    return expression(f"{as_atom(value)}.detach().clone()")
