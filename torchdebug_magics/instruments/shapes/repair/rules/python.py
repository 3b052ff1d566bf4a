"""What Python says of shapes: unpacking, missing arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from torchdebug_magics.format import plural, shape
from torchdebug_magics.instruments.shapes.cell_error.program_slice import value_named
from torchdebug_magics.instruments.shapes.repair.edit import CallEdit, Repair, ValueChange, as_written, method, on_operand
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, argument_changed
from torchdebug_magics.instruments.shapes.repair.source import EditSite, assignments
from torchdebug_magics.probing.dry_runs.inputs import named_tensors

_RETURN_TUPLES = (torch.nn.RNNBase, torch.nn.MultiheadAttention)
_PAIR = 2
_QUOTES = ".[]'"
_SAID = re.compile(r"tuple indices must be|unsupported operand type.*'tuple'|'tuple' object has no attribute|can only concatenate tuple")


def unpacking(facts: FailureFacts) -> Diagnosis | None:
    """``B, C, H, W = x.shape`` of a tensor that has three dimensions."""
    site = facts.site
    if facts.op is not None or not isinstance(facts.error, ValueError) or "to unpack" not in facts.text or site is None:
        return None
    statement = site.statement
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], (ast.Tuple, ast.List)):
        return None
    many = len(statement.targets[0].elts)
    text = ast.unparse(statement)
    node = _owner_of_shape(statement.value)
    tensor = value_named(node, site.names) if node is not None else None
    if isinstance(tensor, torch.Tensor) and node is not None:
        owner = ast.unparse(node)
        x = facts.operand(tensor) or Operand(tensor, owner, owned=False, made=None)
        cut = "after the slice fewer than its " if isinstance(statement.value, ast.Subscript) and x.sizes else ""
        sentence = f"`{text}` unpacks {many} sizes, and `{owner}` has {cut}{plural(len(x.sizes), 'dimension')}: {shape(x.sizes)}"
        return Diagnosis(sentence, tuple(_edits(facts, x, many) if not cut else []), x)
    value = value_named(statement.value, site.names)
    if isinstance(value, torch.Tensor):
        sentence = f"`{text}` unpacks {many} values, and gets a tensor of {shape(tuple(value.shape))}"
        name = next((name for name, tensor in facts.inputs if tensor is value and name.isidentifier()), "")
        turned = Repair(f"{name} = {name}.t()", "the first dimension is unpacked", 5, inputs={name: method("t")})
        return Diagnosis(sentence, (turned,) if name and value.dim() == _PAIR and value.shape[1] == many else ())
    return Diagnosis(f"`{text}` unpacks {many} values: {facts.text}")


def _owner_of_shape(value: ast.expr) -> ast.expr | None:
    match value.value if isinstance(value, ast.Subscript) else value:
        case ast.Call(ast.Attribute(owner, "size"), []) | ast.Attribute(owner, "shape"):
            return owner
    return None


def _edits(facts: FailureFacts, x: Operand, many: int) -> list[Repair]:
    """Edits of the model's own input only: elsewhere it is not known which dimension was lost."""
    at = next((at for at, operand in enumerate(facts.operands) if operand.tensor is x.tensor), None)
    if at is None or not any(tensor is x.tensor for _, tensor in facts.inputs):
        return []
    ways: list[tuple[ValueChange, int, str]] = []
    lacking = many - len(x.sizes)
    if lacking == 1:
        ways = [(method("unsqueeze", 0), 4, "a batch of 1"), (method("unsqueeze", 1), 5, "one channel")]
        ways.append((method("unsqueeze", -1), 6, "one feature"))
    if lacking == -1:
        ways = [(method("squeeze", dim), 4, "") for dim, size in enumerate(x.sizes) if size == 1]
        ways += [(method("flatten", 0, 1), 10, ""), (method("flatten", -2), 11, "")]
    if lacking < -1 and many > 1:
        ways = [(method("flatten", many - 1), 8, "")]
    return [edit for change, rank, why in ways for edit in on_operand(replace(facts, op=None), at, change, rank=rank, why=why)]


def unpacked(facts: FailureFacts) -> Diagnosis | None:
    """``out`` is what ``rnn`` returns: (output, state)."""
    site = facts.site
    if site is None or site.statement is None or not _SAID.search(facts.text):
        return None
    for node in ast.walk(site.statement):
        if isinstance(node, ast.Name) and isinstance(site.names.get(node.id), tuple):
            for assigned in assignments(site, node.id):
                value = site.names[node.id]
                if (path := called(facts, site, assigned.value)) is not None and value and isinstance(value[0], torch.Tensor):
                    call = ast.unparse(assigned.value)
                    code = f"{node.id}, _ = {call}" if len(value) == _PAIR else f"{node.id} = {call}[0]"
                    return _told(facts, path, f"`{node.id}`", code, value)
        if isinstance(node, ast.expr) and (path := called(facts, site, node)) and isinstance(facts.modules[path], _RETURN_TUPLES):
            return _told(facts, path, f"`{ast.unparse(node)}`", f"{ast.unparse(node)}[0]", None)
    return None


def called(facts: FailureFacts, site: EditSite, node: ast.expr) -> str | None:
    """The path of the module that the expression calls."""
    if not isinstance(node, ast.Call):
        return None
    module = value_named(node.func, site.names)
    return next((path for path, part in facts.modules.items() if part is module), None)


def _told(facts: FailureFacts, path: str, what: str, code: str, value: object) -> Diagnosis:
    module = facts.modules[path]
    parts = [shape(tuple(tensor.shape)) for _, tensor in named_tensors(value)]
    of = f" of {' and '.join(parts[:3])}" if parts else ""
    if isinstance(module, _RETURN_TUPLES):
        of = f": {_pair_of(module)}{f'; the output is {parts[0]}' if parts else ''}"
    sentence = f"{what} is the tuple that `{path}` returns{of}"
    first = CallEdit(path, None, lambda args, kwargs: (args, kwargs), lambda output: output[0])
    return Diagnosis(sentence, (Repair(code, "only the output", 2, calls=(first,)),))


def _pair_of(module: torch.nn.Module) -> str:
    return f"(output, {'state' if isinstance(module, torch.nn.RNNBase) else 'weights'})"


def tuples(facts: FailureFacts) -> Diagnosis | None:
    """The (output, state) of a recurrent module, or any tuple, where a tensor is wanted."""
    match = re.match(r"(?P<op>\w+)\(\): argument '(?P<name>\w+)' \(position \d+\) must be Tensor, not (?P<kind>[\w.]+)", facts.text)
    if match is None or (facts.call is None and facts.module is None):
        return None
    given = facts.call.args[0] if facts.call is not None and facts.call.args else None
    makers = [path for path, module in facts.modules.items() if isinstance(module, _RETURN_TUPLES)] if isinstance(given, tuple) else []
    taken = {f"{{0}}{written}": shape(tuple(part.shape)) for written, part in _tensors_in(given)}
    edits = [
        edit
        for rank, (code, sizes) in enumerate(taken.items(), 2)
        for edit in argument_changed(facts, 0, as_written(code), rank=rank, why="only the output" if makers else sizes)
    ]
    holds = ", ".join(f"`{code[3:].strip(_QUOTES)}` {sizes}" for code, sizes in [*taken.items()][:4])
    what = f"a {match['kind']}{f', which holds {holds}' if taken else ''}"
    if makers:
        what = f"a tuple, as `{makers[-1]}` returns it: {_pair_of(facts.modules[makers[-1]])}"
    return Diagnosis(f"{facts.who} expects a tensor, gets {what}", tuple(edits))


def _tensors_in(given: object) -> Iterator[tuple[str, torch.Tensor]]:
    """What is written behind a value for each tensor in it: ``.logits``, as in the outputs of transformers, ``["mask"]``, ``[0]``."""
    fields: Any = getattr(type(given), "__match_args__", ())  # of a named tuple
    named: Any = given.items() if isinstance(given, Mapping) else zip(fields, given, strict=False) if isinstance(given, tuple) else ()
    for name, part in named:
        if isinstance(part, torch.Tensor):
            yield f".{name}" if getattr(given, str(name), None) is part else f"[{name!r}]", part
    if isinstance(given, tuple) and not fields and given and isinstance(given[0], torch.Tensor):
        yield "[0]", given[0]
