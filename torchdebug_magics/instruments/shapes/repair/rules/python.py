"""What Python says of shapes: unpacking, missing arguments, tuples where a tensor is wanted."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import torch

from torchdebug_magics.format import plural, shape
from torchdebug_magics.instruments.shapes.repair.edit import Edit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.facts import Facts, Operand
from torchdebug_magics.instruments.shapes.repair.rules.parts import Diagnosis

__all__ = ["arguments", "tuples", "unpacking"]


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
        return Diagnosis(f"`{text}` unpacks {many} values, and gets a tensor of {shape(tuple(value.shape))}", ())
    return Diagnosis(f"`{text}` unpacks {many} values: {facts.text}")


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
        edits += on_operand(found, at, method("unsqueeze", 0), rank=4, why="a batch of one")
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
        return Diagnosis(f"{who} wants {names}, which {'was' if found['many'] == '1' else 'were'} not given")
    if found := _TOO_MANY.match(facts.text):
        who = where if found["where"].endswith("forward") else f"`{found['where']}`"
        return Diagnosis(f"{who} takes {found['takes']}, self included, and was given {found['given']}")
    if found := _UNKNOWN.match(facts.text):
        name = found["name"].replace("'", "`")
        return Diagnosis(f"{where} has no argument {name}")
    return None


def tuples(facts: Facts) -> Diagnosis | None:
    """The (output, state) of a recurrent module, or any tuple, where a tensor is wanted."""
    found = re.match(r"(?P<op>\w+)\(\): argument '(?P<name>\w+)' \(position \d+\) must be Tensor, not (?P<kind>\w+)", facts.text)
    if found is None or (facts.call is None and facts.module is None):
        return None
    given = facts.call.args[0] if facts.call is not None and facts.call.args else None
    what = f"a {found['kind']}"
    if isinstance(given, tuple) and any(isinstance(one, torch.nn.RNNBase) for one in facts.modules.values()):
        what = "a tuple, as a recurrent module returns it: (output, state)"
    return Diagnosis(f"{facts.who} expects a tensor, gets {what}")
