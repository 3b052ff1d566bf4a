"""What was kept of a model before its updates, and shares memory with its parameters: each update changes both."""

from __future__ import annotations

import ast
import sys
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import assigned_at, attribute_line, edited, finding, statement_at
from torchdebug_magics.instruments.autograd.tape import RecordedOp
from torchdebug_magics.probing.names import user_names
from torchdebug_magics.probing.source.call_sites import value_of
from torchdebug_magics.probing.source.edited_source import exchanging
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import (
    FUNCTIONS,
    LOOPS,
    as_atom,
    bound_names,
    called,
    enclosing,
    expression,
    method,
    names_in,
    nodes,
    targets_of,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import local_values
from torchdebug_magics.probing.state.attributes import attributes_of
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.report import Edit, Location

_CONSTANT = frozenset({"sub", "rsub", "eq", "ne", "equal", "isclose", "allclose", "mse_loss", "l1_loss", "dist"})
"""What gives the same for any tensor and itself."""
_FEWEST_ENTRIES = 3
_CHANGES = frozenset({"append", "clear", "extend", "insert", "pop", "update", "add", "remove", "sort", "fill"})
_COPIED_STATE = "{{name: value.clone() for name, value in {}.items()}}"
_COPIES = {kind.__name__: f"{kind.__name__}({{}})" for kind in (list, dict, set, deque)}
"""Of what changes in place, and is no tensor."""
_WHY = "`state_dict()`, `.data` and `list(model.parameters())` copy nothing: an optimizer writes into the same memory"


class Taken(NamedTuple):
    """A state that ``state_dict()`` has returned, as long as the user's code holds it."""

    state: weakref.ref[Any]
    line: Line | None
    steps_count: int
    """Of all optimizers, before."""
    op_index: int
    """How many ops were recorded before."""


def names_compared(op: RecordedOp, given: tuple[Any, Any], frame: FrameType) -> tuple[str, ...]:
    """The names under which an op that is about to run, and that gives the same for every value, is given one memory twice.

    Empty where it has one name, or where both are parameters: whether those are tied may be what is asked.
    """
    first, known = next(tensors_in(given)), local_values(frame)
    values = {ast.unparse(node): value_of(node, frame, known) for node in nodes((ast.Name, ast.Attribute), statement_at(op.where))}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.shape == first.shape}
    alike = {name: value for name, value in tensors.items() if memory_of(value) == memory_of(first)}
    is_kept = any(map(str.isidentifier, alike)) and not all(isinstance(value, torch.nn.Parameter) for value in alike.values())
    return tuple(alike) if len(alike) > 1 and is_kept and op.name in _CONSTANT else ()


def comparison_finding(op: RecordedOp, names: tuple[str, ...], files: Iterable[str]) -> AutogradFinding:
    """A comparison of a parameter with itself, at the line that should have made the copy."""
    made = [(where, name) for name in names if (where := assigned_at(name, files, op.where)) is not None]
    where, name = min(made, key=lambda pair: pair[0].line) if made else (op.where, names[0])
    value = getattr(statement_at(where), "value", None) if made else None
    is_of_several = isinstance(value, (ast.ListComp, ast.DictComp)) or called(value) in {"list", "dict"}
    copied = "" if value is None else f"copy.deepcopy({ast.unparse(value)})" if is_of_several else f"{as_atom(value)}.detach().clone()"
    return finding(
        "shared_memory",
        f"{' and '.join(f'`{each}`' for each in names[:2])} are one memory: the comparison is the same whatever an update did",
        where,
        f"`{name} = {copied}`" if copied else f"keep a copy where `{name}` is taken",
        op=op.name,
        tensor=name,
        saved_at=op.where,
        explanation=_WHY,
    )


class Repeated(NamedTuple):
    """A list in which each entry is the same object, or the same memory, that is written between the entries."""

    where: Location
    holder: str
    entry: ast.expr
    kind: str
    """What an entry is: a tensor, the state of a model, or the name of its type."""
    entries_count: int


def repeated_entries(
    known: Iterable[tuple[Location, ast.stmt]], written: Container[int], number_of: Callable[[torch.Tensor], int]
) -> Iterator[Repeated]:
    """What ``holder.append(entry)`` has put into lists that are alive; `written` are the numbers of memories that an op wrote.

    Of an object that is no tensor, the text must change it where it is appended: in the same class, loop or function.
    """
    changed: set[tuple[str, object]] = set()
    appends: list[tuple[Location, ast.expr, ast.expr, object]] = []
    for where, statement in known:
        block = _block_around(where)
        called_on = (
            node.func.value for node in nodes(ast.Call, statement) if method(node) in _CHANGES and isinstance(node.func, ast.Attribute)
        )
        written_into = (target.value for target in targets_of(statement) if isinstance(target, ast.Subscript))
        changed.update((ast.unparse(node), block) for node in (*called_on, *written_into))
        match statement:
            case ast.Expr(ast.Call(ast.Attribute(holder, "append"), [entry])):
                appends.append((where, holder, entry, block))
    for where, holder, entry, block in appends:
        for count, values in _lists_called(holder):
            place = _place(values[0])
            if place is None or any(_place(value) != place for value in values):
                continue
            tensor = next(tensors_in(values[0]), None) if place[0] == "memory" else None
            if number_of(tensor) in written if tensor is not None else (ast.unparse(entry), block) in changed:
                kind = "tensor" if values[0] is tensor else "state" if tensor is not None else type(values[0]).__name__
                yield Repeated(where, ast.unparse(holder), entry, kind, count)
                break


def _block_around(where: Location) -> object:
    """The class around a line, as its methods share their objects, or else the innermost loop or function; None at the top of a cell."""
    around = list(enclosing(tree_of(where.file), where.line))
    others = (node for node in reversed(around) if isinstance(node, (*LOOPS, *FUNCTIONS)))
    return next((node for node in reversed(around) if isinstance(node, ast.ClassDef)), None) or next(others, None)


def _lists_called(holder: ast.expr) -> Iterator[tuple[int, list[Any]]]:
    """How many entries the lists have, and some of them, that a variable, or an attribute of an object in one, may stand for."""
    for variable in user_names(sys._getframe(1)):
        value: Any = variable.value
        if isinstance(holder, ast.Attribute):
            value = (attributes_of(value) or {}).get(holder.attr)
        elif not isinstance(holder, ast.Name) or variable.name.partition(" in ")[0] != holder.id:
            continue
        if type(value) in {list, deque} and len(value) >= _FEWEST_ENTRIES:
            yield len(value), [value[0], value[1], value[-1]]


def _place(entry: Any) -> tuple[str, int, object] | None:
    """Where the values of an entry are; None for what cannot change, or is a part of a model."""
    is_state = isinstance(entry, dict) and bool(entry) and all(isinstance(value, torch.Tensor) for value in entry.values())
    tensor = next(tensors_in(entry), None) if isinstance(entry, torch.Tensor) or is_state else None
    if isinstance(entry, torch.nn.Parameter):
        return None
    if tensor is not None:
        return "memory", memory_of(tensor), (tensor.storage_offset(), tuple(tensor.shape))
    return ("object", id(entry), None) if type(entry).__name__ in _COPIES else None


def repeated_module(roots: Iterable[torch.nn.Module]) -> AutogradFinding | None:
    """A list of modules that holds a single one several times, as the text multiplies a list of one."""
    for root in roots:
        for path, module in root.named_modules():
            parts = list(module._modules.values()) if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) else []
            if len({*map(id, parts)}) != 1 or len(parts) == 1 or parts[0] is None or next(parts[0].parameters(), None) is None:
                continue
            owner = root.get_submodule(path.rpartition(".")[0])
            where = attribute_line(owner, path.rpartition(".")[2])
            for node in nodes(ast.BinOp, statement_at(where)):
                match node:
                    case ast.BinOp(ast.List([part]), ast.Mult(), times) if isinstance(part, ast.Call):
                        each = expression(f"[{ast.unparse(part)} for _ in range({ast.unparse(times)})]")
                        return finding(
                            "shared_memory",
                            f"the {len(parts)} parts of `{path}` are one module",
                            where,
                            f"make one for each: `{ast.unparse(each)}`",
                            edits=exchanging(where, node, each),
                            module=path,
                            explanation="a list that is multiplied repeats the object itself: the parts share their weights",
                            is_hint=True,
                        )
    return None


def repeated_finding(lists: Sequence[Repeated]) -> AutogradFinding:
    """The lists, at the line that appends to the first."""
    first, codes, edits = lists[0], list[str](), list[Edit]()
    for each in lists:
        copied = _COPIES.get(each.kind, _COPIED_STATE if each.kind == "state" else "{}.detach().clone()").format(ast.unparse(each.entry))
        codes.append(f"{each.holder}.append({copied})")
        edits += edited(each.where, codes[-1])
    one = {"state": "memory", "tensor": "memory"}.get(first.kind, first.kind)
    return finding(
        "shared_memory",
        f"all {first.entries_count} entries of `{first.holder}` are one {one}",
        first.where,
        fix=" and ".join(f"`{code}`" for code in codes),
        edits=tuple(edits),
        tensor=first.holder,
        explanation=f"`append` keeps `{ast.unparse(first.entry)}` itself, and no copy: what changes it afterwards changes each entry",
    )


def restored_finding(where: Location, loaded: Location | None) -> AutogradFinding:
    """A state that was loaded, after updates, into the parameters whose memory it shares."""
    states = [call for call in nodes(ast.Call, statement_at(where)) if called(call) == "state_dict"]  # of an optimizer, it holds more
    copied = expression(_COPIED_STATE.format(ast.unparse(states[0]))) if len(states) == 1 else None
    return finding(
        "shared_memory",
        "`load_state_dict()` restores nothing: what it is given shares memory with the parameters",
        where,
        "copy what `state_dict()` returns: `copy.deepcopy(model.state_dict())`",
        edits=exchanging(where, states[0], copied) if copied is not None else (),
        saved_at=loaded,
        explanation=_WHY,
    )


def alias_finding(trained: Iterable[torch.nn.Module], among: Iterable[tuple[Location, ast.stmt]]) -> AutogradFinding | None:
    """A model that a loop keeps where a condition holds, as the best so far, and that is no copy: it is trained on."""
    known = {name: value for name, value in user_names(sys._getframe()) if isinstance(value, torch.nn.Module)}
    ids = set(map(id, trained))
    for where, statement in among:
        match statement:
            case ast.Assign([ast.Name(kept)], ast.Name(model)) if kept != model and id(known.get(model)) in ids:
                around = [*enclosing(tree_of(where.file), where.line)]
                loop = next((node for node in around if isinstance(node, LOOPS)), None)
                inner = [] if loop is None else around[around.index(loop) :]
                tests = [(node.test, node.body) for node in inner if isinstance(node, ast.If)]
                is_best = any(names_in(test) & bound_names(*body) for test, body in tests)  # ``if loss < least: least, best = loss, net``
                is_read = any(node.id == kept and isinstance(node.ctx, ast.Load) for node in nodes(ast.Name, loop))
                if known.get(kept) is not known[model] or not is_best or is_read:
                    continue
                new = f"{kept} = copy.deepcopy({model})"
                imported = "" if "copy" in vars(sys.modules["__main__"]) else "import copy\n"
                return finding(
                    "shared_memory",
                    f"`{kept}` is `{model}` itself, which is trained on",
                    where,
                    f"`{new}`",
                    edits=edited(where, f"{imported}{new}", statement=statement),
                    tensor=kept,
                    explanation="an assignment copies nothing: both names are one model, and each update changes it",
                )
    return None
