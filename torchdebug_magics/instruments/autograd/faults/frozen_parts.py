"""Parts of a model that are meant to be frozen, and change: by statistics that go on, or by an attribute that freezes nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import torch

from torchdebug_magics.format import listed, plural
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding
from torchdebug_magics.instruments.autograd.tape import RecordedOp
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.source import edited_source
from torchdebug_magics.probing.source.edited_source import Source, statements
from torchdebug_magics.probing.source.syntax import called, expression, last_name, loops_around, method, nodes, tree_of
from torchdebug_magics.report import Location


def frozen_statistics(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A part of a model that is frozen, while the rest trains, and whose statistics are updated in each forward all the same."""
    ops = [op for op in facts.tape.ops if op.root and op.grad_enabled and not op.in_backward]
    written = {use.memory: op for op in reversed(ops) for use in op.writes}
    for root in facts.roots:
        if facts.updated.isdisjoint(map(id, root.parameters())):
            continue
        parts = {path: part for path, part in root.named_modules() if path and _is_frozen(part, facts)}
        norms = {path: part for path, part in parts.items() if isinstance(part, torch.nn.modules.batchnorm._NormBase)}
        statistics = [(path, facts.tape.numbers.of(one)) for path, part in norms.items() for one in part.buffers(recurse=False)]
        moving = {path: written[memory] for path, memory in statistics if memory in written}
        if moving and (fault := _moving_statistics(root, parts, moving)) is not None:
            yield fault


def _is_frozen(part: torch.nn.Module, facts: TrainingFacts) -> bool:
    """Whether no gradient and no code of the user's changes its parameters, as it does those of a moving average."""
    own = list(part.parameters())
    return bool(own) and not any(parameter.requires_grad or facts.is_written_by_hand(parameter) for parameter in own)


def _moving_statistics(
    root: torch.nn.Module, parts: Mapping[str, torch.nn.Module], moving: Mapping[str, RecordedOp]
) -> AutogradFinding | None:
    """`moving` holds, by path, the op that has updated the statistics of a part."""
    where = call_line(next(iter(moving.values())))
    calls = [(at, call) for at, call in edited_source.calls("" if where is None else where.file) if isinstance(call.func, ast.Attribute)]
    trains = next(((at, call) for at, call in calls if method(call) == "train" and not call.args), None)
    name = variable_of(root) or "model"
    if trains is not None and isinstance(trains[1].func, ast.Attribute):
        where, name = trains[0], ast.unparse(trains[1].func.value)
    evaluated = {ast.unparse(call.func.value) for _, call in calls if method(call) == "eval" and isinstance(call.func, ast.Attribute)}
    if not evaluated - {name, variable_of(root)}:
        return None  # who has called eval() on a part wants its statistics kept; others may want them to follow the data
    tops = [path for path in parts if path.rpartition(".")[0] not in parts]
    around = {next(top for top in tops if f"{path}.".startswith(f"{top}.")) for path in moving}
    kind = type(parts[next(iter(moving))])
    code = f"{name}.{next(iter(around))}.eval()"
    if len(around) > 1 or "".join(around).rpartition(".")[2].isdigit():
        of_kind = f"isinstance(part, torch.nn.{kind.__name__}) and not any(one.requires_grad for one in part.parameters())"
        code = f"{name}.apply(lambda part: part.eval() if {of_kind} else part)"
    tree = tree_of(where.file) if trains is not None and where is not None else None
    source = Source(where, tree) if where is not None and tree is not None else None
    return finding(
        "frozen_statistics",
        f"`{listed(sorted(around))}` is frozen, but its {kind.__name__} statistics are updated",
        where,
        fix=f"call `{code}` after `{where.source}`" if trains is not None and where is not None else f"call `{code}` before the loop",
        edits=() if source is None or source.statement is None else (source.after(source.statement, code),),
        module=next(iter(moving)),
        parameters=tuple(moving),
        explanation="`requires_grad=False` keeps the parameters; in training mode, each forward changes the running mean and variance",
    )


def frozen_in_vain(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A module that was given an attribute `requires_grad`, which freezes nothing, and whose parameters are updated."""
    for root in facts.roots:
        for path, module in root.named_modules():
            if vars(module).get("requires_grad") is not False or facts.updated.isdisjoint(map(id, module.parameters())):
                continue
            files = [op.line.file for op in reversed(facts.tape.ops) if op.line is not None]
            for where, statement in statements(files[0]) if files else ():
                match statement:
                    case ast.Assign([ast.Attribute(holder, "requires_grad")], ast.Constant(False)) if last_name(holder) == path.rpartition(
                        "."
                    )[2] or variable_of(module) == ast.unparse(holder):
                        frozen = ast.Expr(expression(f"{ast.unparse(holder)}.requires_grad_(False)"))
                        source = Source(where, tree) if (tree := tree_of(where.file)) is not None else None
                        yield finding(
                            "frozen_in_vain",
                            f"`{path or ast.unparse(holder)}` is not frozen, and is updated: a module has no `requires_grad` of its own",
                            where,
                            f"write `{ast.unparse(frozen)}`",
                            edits=() if source is None else (source.replacing(statement, ast.unparse(frozen)),),
                            module=path,
                            explanation="Python gives the module a new attribute of that name; the parameters keep theirs",
                        )
                        return


def moved_though_frozen(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Parameters without `requires_grad` that still have a gradient: an optimizer goes on moving them, by momentum or weight decay."""
    moved = facts.watched.moved & facts.reached  # not by a gradient that the user's code gives
    if not moved:
        return
    parameters = [parameter for parameter in facts.parameters.values() if id(parameter) in moved]
    names = facts.names_of(parameters)
    files = [op.line.file for op in reversed(facts.tape.ops) if op.line is not None]
    for where, statement in statements(files[0]) if files else ():
        match statement:
            case ast.Assign([ast.Attribute(holder, "requires_grad")], value) if ast.unparse(value) != "True":
                new = f"{ast.unparse(holder)}.grad = None"
            case ast.Expr(ast.Call(ast.Attribute(holder, "requires_grad_"), [ast.Constant(False)])):
                loops = [loop.iter for loop in loops_around(tree_of(where.file), where.line) if isinstance(loop, ast.For)]
                is_one = any("parameters" in called(part) for loop in loops for part in nodes(ast.Call, loop))
                new = f"{ast.unparse(holder)}.grad = None" if is_one else f"{ast.unparse(holder)}.zero_grad()"
            case _:
                continue
        source = Source(where, tree) if (tree := tree_of(where.file)) is not None else None
        yield finding(
            "frozen_in_vain",
            f"the optimizer goes on updating {plural(len(moved), 'frozen parameter')}: a gradient is still there",
            where,
            fix=f"run `{new}` after it",
            edits=() if source is None or not source.is_alone(statement) else (source.after(statement, new),),
            tensor=names[0] if names else None,
            parameters=names,
            explanation="an optimizer passes by what has no gradient; a gradient of 0 still moves by momentum and weight decay",
        )
        return


def call_line(op: RecordedOp) -> Location | None:
    """The user's line outside the model: the call that the outermost `forward` of those around the op was made by."""
    inside = [place for place, line in enumerate(op.calls) if line.function == "forward"]
    outer = op.calls[inside[-1] + 1 :] if inside else op.calls
    return outer[0].location if outer else op.where
