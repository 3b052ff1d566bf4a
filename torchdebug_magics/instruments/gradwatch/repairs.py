"""The line that is to be changed for a fault of a training, and the change as code: of an optimizer, a schedule, a loss, a parameter."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from torchdebug_magics.format import listed, number, plural
from torchdebug_magics.instruments.gradwatch.record import GradientHistory, ModuleSeries, ParameterSteps
from torchdebug_magics.instruments.gradwatch.report import GradFinding, GradKind
from torchdebug_magics.probing.source import syntax
from torchdebug_magics.probing.source.edited_source import Source, calls, made_as, same, statements
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import called, last_name, loops_around, method, names_in, nodes, targets_of, tree_of
from torchdebug_magics.probing.source.user_code import excerpt
from torchdebug_magics.report import Edit, Location

_USUAL_RATIO, _USUAL_RATE = 1e-3, 1e-3
"""Usual ratio of update norm to weight norm, and the learning rate where nothing else is known."""
_USUAL_DECAY = {"SGD": 5e-4, "AdamW": 0.01}
_DECAY = 0.01
"""What a schedule leaves of a learning rate at the end."""
Repair: TypeAlias = tuple[Location | None, str]
"""The line to change, where it is known, and the change."""


def rounded(value: float) -> float:
    """To one significant digit."""
    return float(f"{value:.0e}") if math.isfinite(value) and value > 0 else value


def usual_rate(history: GradientHistory, ratio: float) -> float:
    """The learning rate that gives updates of the usual size, where the present one gives a `ratio` of update to weights."""
    rate = history.steps[-1].rate
    usual = rounded(rate * _USUAL_RATIO / ratio) if rate > 0 and ratio > 0 else math.nan
    return usual if math.isfinite(usual) else _USUAL_RATE


def rated(history: GradientHistory, new: float, rate: float | None = None) -> Repair:
    """A new learning rate where the optimizer is made with `rate`, that of the last step; or the schedule that has set it."""
    rate = history.steps[-1].rate if rate is None else rate
    what = f"{'lower' if new < rate else 'raise'} the learning rate from {number(rate)} to {number(new)}"
    what = what if rate > 0 else "set the learning rate"

    def raised(value: ast.expr) -> ast.expr:
        return ast.Constant(new) if isinstance(value, ast.Constant) and value.value == rate else value

    def exchange(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.keyword) and node.arg == "lr":
            is_variable = not isinstance(node.value, ast.Constant) and not history.is_scheduled
            return ast.keyword("lr", ast.Constant(new) if is_variable else raised(node.value))
        if isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values, strict=True))
            return ast.Dict(node.keys, [raised(value) if getattr(key, "value", None) == "lr" else value for key, value in pairs])
        return None

    for where, made in made_as(history.file, history.name, history.kind):
        call = syntax.exchanged(made, exchange)
        call.args[1:] = map(raised, call.args[1:])
        if len(made.args) == 1 and all(keyword.arg not in {"lr", None} for keyword in made.keywords) and not history.is_scheduled:
            call.keywords.append(ast.keyword("lr", ast.Constant(new)))  # in place of the class's own default
        if not same(call, made):
            return where, f"{what}: {_exchange(made, call)}"
    for where, node in calls(history.file) if history.is_scheduled and new > rate else ():
        if node.args and ast.unparse(node.args[0]) == history.name and hasattr(torch.optim.lr_scheduler, called(node)):
            return where, f"let `{ast.unparse(node)}` give a larger learning rate, or remove it"
    return None, f'{what}: `for group in {history.name}.param_groups: group["lr"] = {new:g}`'


def kept_rate(history: GradientHistory) -> Repair | None:
    """What keeps the learning rate from falling to nothing; None where a plateau of the loss, measured in each epoch, has lowered it."""
    line = max(history.falls, key=lambda line: history.falls[line], default=None)
    if line is None:
        return _assigned_rate(history)
    loops, code = loops_around(tree_of(line.file), line.line), source_of(line, "step")
    step = next((call for call in nodes(ast.Call, ast.parse(code)) if method(call) == "step"), None)
    made = [] if step is None else made_as(line.file, syntax.root_of(step))
    for where, call in made:
        if not same(lowered := _without_zero(call), call):
            return where, f"the schedule multiplies the learning rate by 0: {_exchange(call, lowered)}"
    if len(loops) > 1 and history.line is not None and history.line.file == line.file and syntax.covers(loops[-1], history.line.line):
        return line.location, f"move `{code}` out of the loop over batches: it is meant to be called once per epoch"
    if any(called(call) == "ReduceLROnPlateau" for _, call in made):
        return None
    total = sum(history.falls.values())
    for _, call in made if math.isfinite(total) else ():
        for gamma in (keyword.value for keyword in call.keywords if keyword.arg == "gamma"):
            if isinstance(gamma, ast.Constant) and isinstance(gamma.value, float) and 0 < gamma.value < 1:
                new = ast.Constant(float(f"{gamma.value ** (math.log(1 / _DECAY) / total):.3g}"))
                slower = syntax.exchanged(call, lambda node, old=gamma, new=new: new if same(node, old) else None)  # type: ignore[misc]
                return line.location, f"call `{code}` once per epoch, or let the learning rate fall less: {_exchange(call, slower)}"
    return line.location, f"call `{code}` once per epoch, not in each step, or let its schedule end with the training"


def _without_zero(call: ast.Call) -> ast.Call:
    """The scheduler with a mild ``gamma`` or ``factor`` in place of one of 0, which makes the learning rate 0."""
    scheduler = getattr(torch.optim.lr_scheduler, called(call), None)
    names = list(inspect.signature(scheduler).parameters) if inspect.isclass(scheduler) else []
    given = [*zip(names, call.args, strict=False), *((keyword.arg or "", keyword.value) for keyword in call.keywords)]
    factors = [value for name, value in given if name.endswith(("gamma", "factor"))]
    zeros = [(value.lineno, value.col_offset) for value in factors if isinstance(value, ast.Constant) and value.value == 0]

    def is_zero(node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) and (node.lineno, node.col_offset) in zeros[:1]

    return syntax.exchanged(call, lambda node: ast.Constant(0.9) if is_zero(node) else None)


def _assigned_rate(history: GradientHistory) -> Repair:
    """Where the user's code sets the learning rate of a group."""
    for where, statement in statements(history.file):
        if any(getattr(getattr(target, "slice", None), "value", None) == "lr" for target in targets_of(statement)):
            code = ast.unparse(statement)
            if isinstance(statement, ast.AugAssign) or code.count("'lr'") > 1:
                return where, f"apply `{code}` once, where the optimizer is made: at each step, it changes what the last one left"
            return where, f"let `{code}` end at a learning rate that still changes the weights, such as {_DECAY:.0%} of the first one"
    return None, "compute the learning rate from its initial value, and not from that of the last step"


def _exchange(old: ast.AST, new: ast.AST | str) -> str:
    return f"use `{new if isinstance(new, str) else ast.unparse(new)}` in place of `{ast.unparse(old)}`"


def source_of(line: Line | None, word: str) -> str:
    """The statement at a line that has the word, without a comment."""
    here = [ast.unparse(statement) for where, statement in statements(line.file) if where.line == line.line] if line else []
    return next((code for code in here if word in code), "")


def _loss_at(line: Line | None) -> tuple[Location | None, ast.expr | None]:
    """What backward() is called on, or what the loss of that name is computed as before that line, and where."""
    where, expr, name = None, None, ""
    for place, statement in statements(line.file) if line is not None else ():
        if line is None or place.file != line.file or place.line > line.line:
            continue
        if place.line == line.line:
            passes = [call.func for call in nodes(ast.Call, statement) if method(call) == "backward"]
            where, expr = place, next((func.value for func in passes if isinstance(func, ast.Attribute)), None)
            name = expr.id if isinstance(expr, ast.Name) else ""
        elif name and isinstance(statement, ast.Assign) and name in map(last_name, statement.targets):
            return place, statement.value
    return where, expr


def unscaled(line: Line | None) -> Repair | None:
    """The loss itself in place of its negative or of a multiple of it, where backward() is called or where the loss is computed."""
    where, expr = _loss_at(line)
    match expr:
        case ast.UnaryOp(ast.USub(), inner) | ast.BinOp(ast.Constant() | ast.UnaryOp(), ast.Mult(), inner):
            return where, _exchange(expr, inner)
        case ast.BinOp(inner, ast.Div() | ast.Mult(), _):
            return where, _exchange(expr, inner)
    return None


def negated(history: GradientHistory) -> Repair:
    """The negative of a loss of a single term; of several terms, which of them it is the text does not tell."""
    where, loss = _loss_at(history.last.backward_line)
    if loss is None or isinstance(loss, (ast.Name, ast.BinOp, ast.UnaryOp)):
        return where, "look at the sign of each term of the loss: what is to become large is subtracted"
    return where, _exchange(loss, ast.UnaryOp(ast.USub(), loss))


def overfit_line(history: GradientHistory) -> str:
    """`%overfit` with the model, batch, loss function and optimizer of the training, where the line of the loss names them."""
    _, loss = _loss_at(history.last.backward_line)
    if isinstance(loss, ast.Call) and len(loss.args) > 1 and not loss.keywords:
        output, *targets = loss.args
        name, assigned = ast.unparse(output), [node for _, node in statements(history.file) if isinstance(node, ast.Assign)]
        output = next((node.value for node in assigned if name in map(ast.unparse, node.targets)), output)
        if isinstance(output, ast.Call) and output.args and not output.keywords:
            batch = ", ".join(map(ast.unparse, (*output.args, *targets)))
            return f"%overfit {ast.unparse(output.func)} ({batch}) {ast.unparse(loss.func)} {history.name}"
    return "%overfit model batch"


def minimized(history: GradientHistory) -> Repair:
    """The optimizer without `maximize`; or the loss in place of its negative."""
    for where, call in made_as(history.file, history.name, history.kind):
        kept = [keyword for keyword in call.keywords if keyword.arg != "maximize"]
        if len(kept) < len(call.keywords):
            return where, _exchange(call, ast.Call(call.func, call.args, kept))
    line, default = history.last.backward_line, "call `backward()` on the loss, not on its negative, with an optimizer that minimizes it"
    return unscaled(line) or (line.location if line is not None else None, default)


def decaying_less(history: GradientHistory) -> Repair:
    """The optimizer with a usual weight decay."""
    usual = ast.keyword("weight_decay", ast.Constant(_USUAL_DECAY.get(history.kind, 0.0)))
    for where, call in made_as(history.file, history.name, history.kind):
        less = [usual if keyword.arg == usual.arg else keyword for keyword in call.keywords]
        if any(keyword.arg == usual.arg for keyword in call.keywords):
            return where, _exchange(call, ast.Call(call.func, call.args, less))
    return None, f"make `{history.name}` with `{ast.unparse(usual)}`"


def made_once(history: GradientHistory) -> tuple[Location, str, tuple[Edit, ...]] | None:
    """(line, fix in words, edits): the optimizer made before the outermost loop that gives it nothing to read.

    None where a condition asks for a new one, or the loop takes the model back to another state.
    """
    for where, _ in made_as(history.file, history.name, history.kind):
        tree = tree_of(where.file)
        source = None if tree is None else Source(where, tree)
        made = None if source is None else source.statement
        if source is None or made is None:
            continue
        loops = loops_around(tree, made.lineno)
        restarts = any(method(call) in {"load_state_dict", "copy_"} for loop in loops for call in nodes(ast.Call, loop))
        loop = next((loop for loop in loops if not syntax.bound_names(loop) & syntax.read_names(made)), None)
        if loops and loop is not None and made in loops[-1].body and not restarts:
            edits = source.merged((source.replacing(made, ""), source.before(loop, source.text(made))))
            return where, f"make `{history.name}` once, before the loop", edits if len(loops[-1].body) > 1 else ()
    return None


def listed_parameters(clip: Line) -> Repair:
    """A list in the place of the generator of parameters that a call of clipping is given."""
    code = source_of(clip, "clip")
    given = [call.args[0] for call in nodes(ast.Call, ast.parse(code)) if called(call).startswith("clip_grad") and call.args]
    for where, statement in statements(clip.file) if given and isinstance(given[0], ast.Name) else ():
        if isinstance(statement, ast.Assign) and ast.unparse(given[0]) in map(ast.unparse, statement.targets):
            return where, _exchange(statement.value, f"list({ast.unparse(statement.value)})")
    return clip.location, "pass `model.parameters()` to it, called anew"


def thawed(history: GradientHistory, frozen: Sequence[ParameterSteps]) -> Repair:
    """Where the parameters of the optimizer are frozen, or where a tensor is made that is to be trained."""
    loose = next((steps.owner.path for steps in frozen if steps.owner.model < 0), "")
    held = {name for _, made in made_as(history.file, history.name, history.kind) for name in names_in(made)}
    fixes: list[tuple[Repair, set[str]]] = []
    for where, statement in statements(history.file):
        code = ast.unparse(statement)
        if loose and loose in map(last_name, targets_of(statement)):
            return where, f"after this line, call `{loose}.requires_grad_()`"
        if code.endswith((".requires_grad_(False)", ".requires_grad = False")):
            around = [loop.iter for loop in loops_around(tree_of(where.file), where.line) if isinstance(loop, ast.For)]
            fixes.append(((where, _exchange(statement, "True".join(code.rsplit("False", 1)))), names_in(statement, *around)))
    of_held = [fix for fix, names in fixes if names & held] or ([fixes[0][0]] if len(fixes) == 1 else [])
    return of_held[0] if of_held and not loose else (None, "set `requires_grad` of what is to be trained to True")


def not_zero(history: GradientHistory, path: str) -> Repair:
    """Random values for a parameter of zeros, where these are given, or where it is made."""
    for where, call in calls(history.file):
        if called(call) == "zeros_" and call.args and path.endswith(ast.unparse(call.args[0]).removeprefix("self.")):
            return where, _exchange(call, f"{ast.unparse(call).replace('zeros_(', 'normal_(').removesuffix(')')}, std=0.02)")
    for where, statement in statements(history.file):
        for target in targets_of(statement):
            if isinstance(target, ast.Attribute) and target.attr == path.rpartition(".")[2]:
                return where, f"after this line, call `torch.nn.init.normal_({ast.unparse(target)}, std=0.02)`"
    return None, f"give `{path}` random values with `torch.nn.init.normal_`"


def finding(
    history: GradientHistory,
    kind: GradKind,
    line: Line | Location | None,
    fix: str,
    parts: Sequence[ModuleSeries | ParameterSteps] = (),
    *,
    why: str,
    main: ModuleSeries | None = None,
    **fields: Any,
) -> GradFinding:
    """At a line, else at that of the update; `main` is the module to look at, else the first of the `parts` that are concerned."""
    line = line or history.line
    where = line.location if isinstance(line, Line) else line
    module = next(iter(history.names([main] if main is not None else parts)), None)
    code, modules = excerpt(where) if where else (), history.names(parts)
    return GradFinding(kind=kind, location=where, fix=fix, excerpt=code, module=module, modules=modules, explanation=why, **fields)


def title(module: str) -> str:
    """As it stands in a sentence."""
    return f"`{module}`" if module else "the model"


def named(history: GradientHistory, parts: Sequence[ParameterSteps]) -> str:
    """Their modules, or the variables of tensors that are in none."""
    names = [title(name) for name in history.names(parts)]
    return plural(len(names), "tensor") + " of no module" if any(name.startswith("`tensor ") for name in names) else listed(names)


def modules(history: GradientHistory, parts: Sequence[ParameterSteps]) -> str:
    """Its name where it is one, else how many there are."""
    count = len({steps.owner for steps in parts})
    return named(history, parts) if count == 1 else plural(count, "module")
