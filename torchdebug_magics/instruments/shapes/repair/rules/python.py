"""What Python and TorchScript say of shapes: unpacking, missing arguments."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.format import plural, shape
from torchdebug_magics.instruments.shapes.repair.edit import Edit, OpEdit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis
from torchdebug_magics.instruments.shapes.repair.rules.tuple_results import called
from torchdebug_magics.probing.where import owner

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.source import Site

__all__ = ["arguments", "scripted", "unpacking"]


def unpacking(facts: Facts) -> Diagnosis | None:
    """``B, C, H, W = x.shape`` of a tensor that has three dimensions."""
    site = facts.site
    if facts.op is not None or not isinstance(facts.error, ValueError) or "to unpack" not in facts.text or site is None:
        return None
    statement = site.statement
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], (ast.Tuple, ast.List)):
        return None
    many = len(statement.targets[0].elts)
    text = ast.unparse(statement)
    owner = _owner_of_shape(statement.value)
    tensor = _held(site.names, owner) if owner is not None else None
    if isinstance(tensor, torch.Tensor) and owner is not None:
        x = _operand(facts, tensor, owner)
        cut = _cut(statement.value, len(x.sizes))
        sentence = f"`{text}` unpacks {many} sizes, and `{owner}` has {cut}{plural(len(x.sizes), 'dimension')}: {shape(x.sizes)}"
        return Diagnosis(sentence, tuple(_edits(facts, x, many) if not cut else []), x)
    value = _held(site.names, ast.unparse(statement.value))
    if isinstance(value, torch.Tensor):
        turned = _turned_input(facts, value, many)
        return Diagnosis(f"`{text}` unpacks {many} values, and gets a tensor of {shape(tuple(value.shape))}", tuple(turned))
    if pieces := _pieces(site.names, statement.value):
        return Diagnosis(f"`{text}` unpacks {many} values, and {pieces}")
    path = called(facts, site, statement.value)
    gave = facts.gave.get(path) if path is not None else None
    if gave is not None and len(gave) == 1:
        return Diagnosis(f"`{text}` unpacks {many} values, and `{path}` gives one tensor of {shape(gave[0])}")
    return Diagnosis(f"`{text}` unpacks {many} values: {facts.text}", tuple(_chunks(site, statement, many)))


def _chunks(site: Site, statement: ast.Assign, many: int) -> list[Edit]:
    """As many pieces as there are names for them."""
    call = statement.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "chunk" or not call.args:
        return []
    inner = site.within(call)
    if inner is None or not isinstance(call.args[0], ast.Constant) or many < 1:
        return []
    new = ast.Call(call.func, [ast.Constant(many), *call.args[1:]], call.keywords)
    code = ast.unparse(ast.Assign(statement.targets, new, lineno=statement.lineno))
    run = OpEdit(inner, "chunk", lambda func, args, kwargs: func(args[0], many, *args[2:], **kwargs))
    return [Edit(code, "a piece for each name", 5, ops=(run,))]


def _turned_input(facts: Facts, value: torch.Tensor, many: int) -> list[Edit]:
    name = next((name for name, tensor in facts.inputs if tensor is value and name.isidentifier()), None)
    if name is None or value.dim() != 2 or value.shape[1] != many:
        return []
    change = method("t")
    why = f"{shape(tuple(value.shape))} becomes {shape(tuple(value.shape)[::-1])}"
    return [Edit(f"{name} = {change.text(name)}", why, 5, inputs={name: change})]


def _pieces(names: Any, value: ast.expr) -> str:
    """The chunks that ``x.split(4, dim=1)`` returns."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr not in {"split", "chunk"}:
        return ""
    x = _held(names, ast.unparse(value.func.value))
    numbers = {one.arg: one.value for one in value.keywords if one.arg} | dict(zip(("size", "dim"), value.args, strict=False))
    given = {name: _number(one) for name, one in numbers.items()}
    size, dim = next((given[name] for name in ("size", "split_size", "chunks") if name in given), None), given.get("dim", 0)
    if not isinstance(x, torch.Tensor) or not size or dim is None or not -x.dim() <= dim < x.dim():
        return ""
    whole = x.shape[dim]
    length = size if value.func.attr == "split" else -(-whole // size)
    return f"dimension {dim} of `{ast.unparse(value.func.value)}` has {whole}, which makes {-(-whole // length)} pieces of {length}"


def _number(node: ast.expr) -> int | None:
    try:
        found = ast.literal_eval(node)
    except ValueError:
        return None
    return found if type(found) is int else None


def _cut(value: ast.expr, many: int) -> str:
    return "" if not isinstance(value, ast.Subscript) or not many else "after the slice fewer than its "


def _owner_of_shape(value: ast.expr) -> str | None:
    if isinstance(value, ast.Subscript):
        value = value.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "size" and not value.args:
        return ast.unparse(value.func.value)
    return ast.unparse(value.value) if isinstance(value, ast.Attribute) and value.attr == "shape" else None


def _held(names: Any, text: str) -> object:
    root, *rest = text.split(".")
    value = names.get(root)
    for name in rest:
        value = getattr(value, name, None) if name.isidentifier() else None
    return value


def _operand(facts: Facts, tensor: torch.Tensor, name: str) -> Operand:
    for one in facts.operands:
        if one.tensor is tensor:
            return one
    return Operand(tensor, name, owned=False, made=None)


def _edits(facts: Facts, x: Operand, many: int) -> list[Edit]:
    """Of the model's own input only: elsewhere it is not known which dimension was lost."""
    own = next((name for name, tensor in facts.inputs if tensor is x.tensor), None)
    if own is None:
        return []
    at = [one.tensor for one in facts.operands].index(x.tensor) if any(one.tensor is x.tensor for one in facts.operands) else None
    if at is None:
        return []
    found = replace(facts, op=None)
    edits: list[Edit] = []
    lacking = many - len(x.sizes)
    if lacking == 1:
        edits += on_operand(found, at, method("unsqueeze", 0), rank=4, why="a batch of 1")
        edits += on_operand(found, at, method("unsqueeze", 1), rank=5, why="one channel")
        edits += on_operand(found, at, method("unsqueeze", -1), rank=6, why="one feature")
    if lacking == -1:
        edits += [
            edit for dim in range(len(x.sizes)) if x.sizes[dim] == 1 for edit in on_operand(found, at, method("squeeze", dim), rank=4)
        ]
        edits += on_operand(found, at, method("flatten", 0, 1), rank=10)
        edits += on_operand(found, at, method("flatten", -2), rank=11)
    if lacking < -1 and many > 1:
        edits += on_operand(found, at, method("flatten", many - 1), rank=8)
    return edits


_SCRIPTED = re.compile(r'File "(?P<file>[^"]+)"(?:(?!File ").)*?\n(?P<line>[^\n]*\S)\n\s*~+ <--- HERE', re.DOTALL)
_PRODUCT = re.compile(r"\((?P<rows>\d+)x(?P<got>\d+) and (?P<wanted>\d+)x(?P<out>\d+)\)")


def scripted(facts: Facts) -> Diagnosis | None:
    """What TorchScript says at the end of its own traceback, at the first line of the user's in it."""
    whole = str(facts.error)
    if facts.op is not None or "TorchScript" not in whole:
        return None
    said = facts.text if "TorchScript" not in facts.text else whole.strip().splitlines()[-1]
    lines = [found["line"].strip() for found in _SCRIPTED.finditer(whole) if owner(found["file"]) == "user"]
    where = f" at `{lines[-1]}`" if lines else ""
    sentence = f"{facts.who} is TorchScript and failed{where}: {said}"
    found = _PRODUCT.search(said)
    if found is None or facts.module is None:
        return Diagnosis(sentence)
    weight = (int(found["out"]), int(found["wanted"]))
    fits = [name for name, one in facts.module.named_parameters() if tuple(one.shape) == weight and name.endswith("weight")]
    if len(fits) != 1:
        return Diagnosis(sentence)
    path = f"{facts.path}.{fits[0]}" if facts.path else fits[0]
    return Diagnosis(f"`{path.rpartition('.')[0]}` expects {weight[1]} features, gets {found['got']}; it is TorchScript and failed{where}")


_MISSING = re.compile(r"(?P<where>[\w.<>]+)\(\) missing (?P<many>\d+) required (?:positional|keyword-only) arguments?: (?P<names>.*)")
_TOO_MANY = re.compile(r"(?P<where>[\w.<>]+)\(\) takes (?P<takes>.*) but (?P<given>\d+) (?:was|were) given")
_UNKNOWN = re.compile(r"(?P<where>[\w.<>]+)\(\) got an unexpected keyword argument (?P<name>'\w+')")


def arguments(facts: Facts) -> Diagnosis | None:
    """A call with other arguments than the forward has."""
    if facts.op is not None or not isinstance(facts.error, TypeError):
        return None
    where = f"`{facts.path}`" if facts.path else f"`{type(facts.module).__name__}`" if facts.module is not None else "the forward"
    if found := _MISSING.match(facts.text):
        names = found["names"].replace("'", "`")
        who = where if found["where"].endswith("forward") else f"`{found['where']}`"
        return Diagnosis(f"{who} expects {names}, which {'was' if found['many'] == '1' else 'were'} not passed")
    if found := _TOO_MANY.match(facts.text):
        who = where if found["where"].endswith("forward") else f"`{found['where']}`"
        return Diagnosis(f"{who} takes {found['takes']}, self included, and got {found['given']}")
    if found := _UNKNOWN.match(facts.text):
        name = found["name"].replace("'", "`")
        return Diagnosis(f"{where} has no argument {name}")
    return None
