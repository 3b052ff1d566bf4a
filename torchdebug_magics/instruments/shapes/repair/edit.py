"""An edit of the user's code: what to type, and the same thing done to a trial run."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from typing import Any

import torch
from torch.nn import functional

from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand, Sizes, is_loss
from torchdebug_magics.instruments.shapes.repair.size_history import same_input
from torchdebug_magics.instruments.shapes.repair.source import EditSite
from torchdebug_magics.probing.dry_runs.inputs import named_tensors, rebuilt


@dataclass(frozen=True)
class ValueChange:
    """A change of one tensor: as text, and as it is done."""

    text: Callable[[str], str]
    apply: Callable[[Any], Any]


def as_written(form: str) -> ValueChange:
    """What is written for a tensor, with ``{0}`` in its place; that is also what is run."""
    return ValueChange(form.format, lambda tensor: eval(form.format("x"), {"x": tensor, "torch": torch, "F": functional}))  # noqa: S307 - our own


def method(name: str, *args: Any) -> ValueChange:
    """``method("flatten", 1)`` is ``x.flatten(1)``."""
    call = f".{name}({', '.join(map(repr, args))})"
    # What is turned twice is written as it was.
    undoes = [call] if name in {"t", "transpose"} else []
    undoes += [".T", ".t()"] if name == "transpose" and args == (0, 1) else [".mT"] if name == "transpose" and args == (-2, -1) else []

    def text(x: str) -> str:
        turned = next((undoe for undoe in undoes if x.endswith(undoe)), None)
        return f"{x}{call}" if turned is None else x.removesuffix(turned)

    return ValueChange(text, lambda tensor: getattr(tensor, name)(*args))


def then(first: ValueChange, second: ValueChange) -> ValueChange:
    """Both changes, one after the other."""
    return ValueChange(lambda x: second.text(first.text(x)), lambda tensor: second.apply(first.apply(tensor)))


@dataclass(frozen=True, eq=False)
class OpEdit:
    """At this place of the user's, ``run(func, args, kwargs)`` instead of ``func(*args, **kwargs)``."""

    site: EditSite
    op: str
    run: Callable[[Any, Any, Any], Any]


@dataclass(frozen=True, eq=False)
class CallEdit:
    """A module's arguments, changed where it is called from this place; from anywhere without one."""

    path: str
    site: EditSite | None
    arguments: Callable[[Any, Any], tuple[Any, Any]]
    result: Callable[[Any], Any] | None = None
    """What is made of its output, where that is changed too."""


@dataclass(frozen=True, eq=False)
class Repair:
    """One place of the code changed."""

    code: str
    why: str = ""
    rank: int = 20
    """How natural it is; less is more."""
    modules: Mapping[str, Callable[[torch.nn.Module], torch.nn.Module]] = field(default_factory=dict)
    """The new one for each path, made from the old one."""
    parameters: Mapping[str, Sizes] = field(default_factory=dict)
    ops: tuple[OpEdit, ...] = ()
    calls: tuple[CallEdit, ...] = ()
    inputs: Mapping[str, ValueChange] = field(default_factory=dict)
    """How inputs change, by the forward's names for them."""
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Numbers of a module of the user's own, by its path and by name."""
    many: int = 1
    """How many places of the code it touches."""
    moves: bool = False
    """Whether modules have other numbers from then on, so that it is to be typed after those that name them."""

    @property
    def sites(self) -> list[EditSite]:
        """The user's expressions that it changes."""
        return [site for site in (*(op.site for op in self.ops), *(call.site for call in self.calls)) if site is not None]

    @property
    def natural(self) -> bool:
        """Whether it is worth showing before one that touches more places."""
        return self.rank < _UNNATURAL


_UNNATURAL = 45


def as_typed(path: str) -> str:
    """A module path as Python: ``blocks[0].fc``; ``model[1]`` where the model itself is a list of modules."""
    typed = ""
    for name in path.split("."):
        if name.isidentifier() and not iskeyword(name):
            typed = f"{typed}.{name}".lstrip(".")
        elif name:
            typed = f"{typed or 'model'}[{name if name.isdigit() else repr(name)}]"
    return typed or "model"


def together(first: Repair, second: Repair) -> Repair:
    """Two edits of which the first alone leads no further."""
    typed = (second, first) if first.moves else (first, second)
    tables: dict[str, Any] = {
        name: {**getattr(first, name), **getattr(second, name)} for name in ("modules", "parameters", "inputs", "attributes")
    }
    return Repair(
        "\n".join(edit.code for edit in typed),
        "; ".join(dict.fromkeys(filter(None, (first.why, second.why)))),
        first.rank,
        ops=(*first.ops, *second.ops),
        calls=(*first.calls, *second.calls),
        many=first.many + second.many,
        moves=first.moves or second.moves,
        **tables,
    )


def on_operand(
    facts: FailureFacts, at: int, change: ValueChange, *, rank: int = 10, why: str = "", first: bool = False, owned: bool = False
) -> list[Repair]:
    """The edit that changes the operand at this place of the failing op or module, written where the user would write it.

    None where that is not in the user's code. An input is changed at the `first` line of the forward, if it is to be. A parameter is only
    changed if it may be `owned`, in the user's own expression.
    """
    operand = facts.operands[at]
    if operand.owned:
        edit = _in_place(facts, at, change) if owned else None
        return [] if edit is None else [_ranked(edit, rank, why)]
    if facts.calls_module:
        at_call = _argument(facts, at, change) if is_loss(facts.module) else None
        edit = at_call or _input(operand, change) or _argument(facts, at, change) or _insertion(facts, at, change)
        edit = edit or _input(replace(operand, made=same_input(operand.made), name=""), change)
    else:
        edit = (first and _input(operand, change)) or _in_place(facts, at, change) or _input(operand, change)
    return [] if edit is None else [_ranked(edit, rank, why)]


def parameter_edit(operand: Operand, sizes: Sizes, *, rank: int = 30) -> list[Repair]:
    """A parameter of the user's own with other sizes."""
    if not operand.owned or not isinstance(operand.tensor, torch.nn.Parameter):
        return []
    code = f"{as_typed(operand.name)} = nn.Parameter(torch.zeros({', '.join(map(str, sizes))}))"
    return [Repair(code, "a parameter of the matching size", rank, parameters={operand.name: sizes})]


def at_tensor(at: int, change: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with their tensor at this place changed."""
    places = itertools.count()

    def changed(tensor: torch.Tensor) -> Any:
        return change(tensor) if next(places) == at else tensor

    return rebuilt(args, changed), rebuilt(kwargs, changed)


def _input(operand: Operand, change: ValueChange) -> Repair | None:
    """The model's input, at the beginning of its forward."""
    if operand.made is None or not operand.is_input:
        return None
    name = operand.made.op
    shown = operand.name if operand.name.isidentifier() else name
    if not shown.isidentifier():  # a part of a tuple or a mapping
        return None
    return Repair(f"{shown} = {change.text(shown)}", inputs={name: change})


def _in_place(facts: FailureFacts, at: int, change: ValueChange) -> Repair | None:
    """Inside the user's expression, which calls the op itself."""
    site, operand = facts.site, facts.operands[at]
    if site is None or facts.op is None or not facts.direct:
        return None
    node = site.operand_node(at, operand.tensor, direct=True)
    writes = facts.op in {"__setitem__", "setitem"} or (facts.op.endswith("_") and not facts.op.endswith("__"))
    if node is None or (at == 0 and writes and not isinstance(site.expression, ast.AugAssign)):
        return None  # what is written into another tensor is lost
    return Repair(site.changed(node, change.text), ops=(OpEdit(site, facts.op, functools.partial(_with_change, at, change)),))


def _with_change(at: int, change: ValueChange, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = at_tensor(at, change.apply, args, kwargs)
    return func(*args, **kwargs)


def _argument(facts: FailureFacts, at: int, change: ValueChange) -> Repair | None:
    """In the user's call of the module, or of another around it, where the same tensor is an argument of that."""
    site, path = facts.site, facts.path
    if site is None or path is None or at >= len(facts.given):
        return None
    tensor = facts.given[at].tensor
    if facts.outer is not None:
        given = [argument for _, argument in named_tensors((facts.outer.args, facts.outer.kwargs))]
        at = next((place for place, argument in enumerate(given) if argument is tensor), len(given))
        path = next(path for path, module in facts.modules.items() if module is facts.outer.module)
    node = site.operand_node(at, tensor, direct=True)
    if node is None:
        return None
    name = getattr(node, "id", "")
    code = f"{name} = {change.text(name)}" if name and site.assigns_over(name) else site.changed(node, change.text)
    if is_loss(facts.module) and facts.op is not None:  # it may be one that is made in the line
        return Repair(code, ops=(OpEdit(site, facts.op, functools.partial(_with_change, at, change)),))
    return Repair(code, calls=(CallEdit(path, site, lambda args, kwargs: at_tensor(at, change.apply, args, kwargs)),))


def _insertion(facts: FailureFacts, at: int, change: ValueChange) -> Repair | None:
    """A module put before the failing one in its `nn.Sequential`."""
    parent, _, place = (facts.path or "").rpartition(".")
    is_listed = place.isdigit() and type(facts.modules.get(parent)) is torch.nn.Sequential
    if at or facts.path is None or not is_listed or change.text("x") != "x.flatten(1)":
        return None
    code = f"{as_typed(parent)}.insert({place}, nn.Flatten())"
    return Repair(code, calls=(CallEdit(facts.path, None, lambda args, kwargs: at_tensor(0, change.apply, args, kwargs)),), moves=True)


def _ranked(edit: Repair, rank: int, why: str) -> Repair:
    return replace(edit, rank=rank, why=why or edit.why)
