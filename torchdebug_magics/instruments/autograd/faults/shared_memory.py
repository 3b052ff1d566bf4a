"""What was kept of a model before its updates, and shares memory with its parameters: each update changes both."""

from __future__ import annotations

import ast
import copy
import weakref
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import assigned_at, finding, statement_at
from torchdebug_magics.instruments.autograd.tape import RecordedOp
from torchdebug_magics.probing.source.call_sites import value_of
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import as_atom, called, exchanged, expression, nodes
from torchdebug_magics.probing.source.user_code import local_values
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.tensors import tensors_in

_MOST_STATES = 64
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
        return expression(f"{{name: value.clone() for name, value in {ast.unparse(node)}.items()}}") if is_state else None

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
