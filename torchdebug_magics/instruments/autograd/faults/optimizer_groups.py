"""The edits that give an optimizer the parameters that it lacks, or those of the model that is trained."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

import torch

from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.source_readings import statement_at
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.source.edited_source import Source, exchanging
from torchdebug_magics.probing.source.syntax import called, expression, nodes, tree_of
from torchdebug_magics.report import Edit, Location


def with_parts(facts: TrainingFacts, kind: str, where: Location | None, names: tuple[str, ...]) -> tuple[Edit, ...]:
    """``Adam(net.head.parameters())`` with the other parts of `net` that have these parameters."""
    parts = dict.fromkeys(name.partition(".")[0] for name in names)
    for call in nodes(ast.Call, statement_at(where)):
        match call:
            case ast.Call(args=[ast.Call(ast.Attribute(ast.Attribute(whole, part), "parameters"), []) as given, *_]) if (
                called(call) == kind
            ):
                roots = [root for root in facts.roots if {part, *parts} <= dict(root.named_children()).keys()]
                others = [expression(f"{ast.unparse(whole)}.{name}.parameters()") for name in parts]
                every = ast.List([ast.Starred(each, ast.Load()) for each in (given, *others)], ast.Load())
                return exchanging(where, given, every) if roots else ()
    return ()


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
