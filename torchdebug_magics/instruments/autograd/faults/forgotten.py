"""Parameters that no `parameters()` returns, and edits that give an optimizer those that it lacks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.source_readings import attribute_line, statement_at, with_options
from torchdebug_magics.probing.graphs import is_graph_leaf
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.source.edited_source import Source, exchanging
from torchdebug_magics.probing.source.syntax import called, expression, nodes, tree_of
from torchdebug_magics.report import Edit, Location

WHY_HIDDEN = "`parameters()` returns only what is an `nn.Parameter`, and does not search plain lists and dicts"
_CONTAINERS = (list, tuple, dict)
_FILLED = frozenset({"randn", "rand", "zeros", "ones", "empty", "full", "Tensor", "FloatTensor"})
_EMPTY = ("[]", "()", "{}", "list()", "dict()")
_DEEPEST = 3


def with_model(where: Location | None, model: str) -> tuple[str, tuple[Edit, ...]]:
    """(fix, edits) where an optimizer is made with another model's parameters; empty where it is not made so."""
    for call in nodes(ast.Call, statement_at(where)):
        match call:
            case ast.Call(ast.Attribute(ast.Name(other), "parameters"), []) if other != model:
                new = expression(f"{model}.parameters()")
                return f"use `{ast.unparse(new)}` in place of `{ast.unparse(call)}`", exchanging(where, call, new)
    return "", ()


def with_group(facts: TrainingFacts, optimizer: str, where: Location | None, missing: Iterable[torch.nn.Parameter]) -> tuple[Edit, ...]:
    """The parameters as one more group, below the statement that makes the optimizer; modules that lack all of theirs as a whole."""
    tree, lacking = None if where is None else tree_of(where.file), set(map(id, missing))
    codes: list[str] = []
    for root in facts.roots:
        variable = variable_of(root)
        wholes = [f"{path}." if path else "" for path, module in root.named_modules() if set(map(id, module.parameters())) <= lacking]
        for path, parameter in root.named_parameters() if variable else ():
            whole = next((each for each in wholes if path.startswith(each)), None)
            if id(parameter) in lacking:
                code = f"{variable}{_subscripted(path)}" if whole is None else f"*{variable}{_subscripted(whole)}parameters()"
                codes.append(code)
    if where is None or tree is None or not codes or (made := Source(where, tree)).statement is None:
        return ()
    group = f"{optimizer}.add_param_group({{'params': [{', '.join(dict.fromkeys(codes))}]}})"
    return made.merged((made.after(made.statement, group),))


def _subscripted(path: str) -> str:
    """``[0].weight`` for ``0.weight``."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f".{path}")


class Hidden(NamedTuple):
    """A parameter that is not registered, or a tensor that requires a gradient and is no parameter."""

    name: str
    parameter: torch.Tensor
    owner: torch.nn.Module
    attribute: str


def hidden_parameters(root: torch.nn.Module) -> Iterator[Hidden]:
    """Of a model and of the modules in it."""
    for path, module in root.named_modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.requires_grad and is_graph_leaf(value) and _begins_as_weight(module, attribute):
                yield Hidden(f"{path}.{attribute}".lstrip("."), value, module, attribute)
            elif not attribute.startswith("_") and type(value) in _CONTAINERS:
                inside = _parameters_in(value, f"{path}.{attribute}".lstrip("."))
                yield from (Hidden(name, parameter, module, attribute) for name, parameter in inside)


def _begins_as_weight(module: torch.nn.Module, attribute: str) -> bool:
    """Whether ``__init__`` fills the tensor as one fills a weight: with random numbers, or a constant; others may hold points or inputs."""
    statement = statement_at(attribute_line(module, attribute))
    return statement is not None and any(called(call) in _FILLED for call in nodes(ast.Call, statement))


def registering(hidden: Iterable[Hidden]) -> str:
    """The statements that make plain containers ones that register what they hold, and tensors parameters; words where that takes more."""
    fixes: list[str] = []
    for owner, attribute in {(id(each.owner), each.attribute): (each.owner, each.attribute) for each in hidden}.values():
        value, statement = vars(owner)[attribute], statement_at(attribute_line(owner, attribute))
        module = "nn" if getattr(type(owner).__init__, "__globals__", {}).get("nn") is torch.nn else "torch.nn"
        if isinstance(value, torch.Tensor):
            code = with_options(statement.value, _FILLED, "requires_grad", None) if isinstance(statement, ast.Assign) else "..."
            fixes.append(f"`self.{attribute} = {module}.Parameter({code})`")
            continue
        parts = list(value.values()) if isinstance(value, dict) else list(value)
        of_what = next((kind for kind in (torch.nn.Module, torch.nn.Parameter) if all(isinstance(part, kind) for part in parts)), None)
        container = f"{of_what.__name__}{'Dict' if isinstance(value, dict) else 'List'}" if of_what is not None else "ModuleList"
        has_names = not isinstance(value, dict) or all(isinstance(key, str) for key in value)
        if of_what is None or not has_names or not isinstance(statement, ast.Assign):
            fixes.append(f"keep the modules of `{attribute}` in an `{module}.{container}`")
        else:
            code = ast.unparse(statement.value)
            fixes.append(f"`self.{attribute} = {module}.{container}({'' if code in _EMPTY else code})`")
    return " and ".join(dict.fromkeys(fixes))


def _parameters_in(value: object, prefix: str, depth: int = 0) -> Iterator[tuple[str, torch.nn.Parameter]]:
    if isinstance(value, torch.nn.Parameter):
        yield prefix, value
    elif isinstance(value, torch.nn.Module):
        yield from ((f"{prefix}.{name}", parameter) for name, parameter in value.named_parameters())
    elif isinstance(value, _CONTAINERS) and depth < _DEEPEST:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _parameters_in(part, f"{prefix}[{key!r}]", depth + 1)
