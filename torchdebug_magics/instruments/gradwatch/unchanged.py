"""What no update has changed, or not as it was meant: the first link that breaks on the way from the loss to it, and its repair as code."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchdebug_magics.format import listed, number, plural
from torchdebug_magics.instruments.gradwatch.record import GradientHistory, Link, ModuleSeries, ParameterSteps, RunRecord
from torchdebug_magics.instruments.gradwatch.report import GradFinding, GradKind
from torchdebug_magics.probing.modules import live_modules
from torchdebug_magics.probing.source.edited_source import cells, made_later, same
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import (
    called,
    exchanged,
    last_name,
    method,
    nodes,
    statement_at,
    targets_of,
    tree_of,
)
from torchdebug_magics.probing.source.where import excerpt, location
from torchdebug_magics.report import Location

USUAL_RATIO = 1e-3
"""Usual ratio of update norm to weight norm."""
_DEFAULT_RATE = 1e-3
_FEW_UPDATES, _STILL_STEPS, _TINY_RATE = 3, 20, 1e-5
_TINY_GRADIENT, _NOT_CONVERGED = 1e-7, 1e-3
"""Norm of a gradient that is too small for a loss that is above the second one."""
_NO_DROP = 0.005
_Fix = tuple[Location | None, str]


def unchanged(record: RunRecord, history: GradientHistory, _: list[ModuleSeries]) -> Iterator[GradFinding]:
    """What no update has changed, by the first link that breaks between the loss and a changed parameter."""
    name, furthest = history.name, max((one.link for one in history.chains.values()), default=Link.NONE)
    chains = [one for one in history.chains.values() if one.steps_count >= _FEW_UPDATES and one.link is not Link.NONE]
    # A part of a model may be frozen, or not used, on purpose; a tensor outside of every module is held to be trained.
    loose = [one for one in chains if one.owner.model < 0 and furthest is Link.NONE and one.link <= Link.WITHOUT_GRADIENT]
    frozen = [one for one in loose or chains if one.link is Link.FROZEN]
    zero = [one for one in chains if one.link is Link.ZERO_GRADIENT and one.is_zero and one.is_matrix]
    late = [one for one in chains if one.steps_count >= _STILL_STEPS and not history.is_warming_up]
    matrices = [one.link for one in history.chains.values() if one.is_matrix]
    unrated = [one for one in late if one.link is Link.ZERO_RATE]
    step = f"`{name}.step()`"
    if frozen and (loose or furthest is Link.FROZEN):
        where, fix = _thawed(history, frozen)
        headline = f"{_named(record, frozen)} {'is' if len(frozen) == 1 else 'are'} not trained: `requires_grad` is False"
        yield _broken(record, frozen, where or history.line, headline, fix, f"{step} changes only tensors that get a gradient")
    elif furthest in {Link.WITHOUT_GRADIENT, Link.ZERO_GRADIENT} and history.zeroed is not None:
        code = _code(history.zeroed, "zero_grad")
        fix = f"move `{code}` before `{_code(history.backward_line, 'backward')}`" if code else f"zero the gradients after {step}"
        headline = f"the gradients are zeroed between backward() and {step}"
        yield _broken(record, chains, history.zeroed, headline, fix, "the update finds no gradient, and changes nothing")
    elif history.backward_line is not None and (loose or furthest is Link.WITHOUT_GRADIENT):
        cut, where = loose or chains, next((made for made, _call in _optimizer_calls(history)), None)
        fix, edits = made_later(where, history.line.line if history.line is not None else 0)
        fix = fix or "create it after the model has all its parameters; `%%autograd` above this cell names a line that cuts the graph"
        headline = f"`{name}` updates {_named(record, cut)}, on which the loss does not depend"
        why = "an optimizer updates the tensors that it was created with, and only those that get a gradient"
        yield replace(
            _broken(record, cut, where or history.line, headline, fix, why), edits=edits, fix_state="compiles" if edits else "advice"
        )
    elif len(zero) > 1:
        paths = _paths(record, zero)
        where, fix = _not_zero(history, paths[0])
        headline = f"{listed([f'`{path}`' for path in paths])} are all zero, and so are their gradients"
        why = "where tensors are multiplied, the gradient of each has the other as a factor: both stay zero for ever"
        yield _broken(record, zero, where or history.line, headline, fix, why)
    elif unrated:
        where, fix = _rated(history, 0.0, 0.0)
        why = "the gradients are not zero, but each update is"
        headline = f"the weights of {_named(record, unrated)} do not change: the learning rate is 0"
        yield _broken(record, unrated, where or history.line, headline, fix, why)
    else:
        yield from _barely_moved(record, history, late, max(matrices, default=furthest))


def _barely_moved(record: RunRecord, history: GradientHistory, late: list[ParameterSteps], furthest: Link) -> Iterator[GradFinding]:
    """Updates that change next to nothing, although there are gradients, in a training that does not improve."""
    rounded = [one for one in late if one.link is Link.UNMOVED and one.is_half]
    if rounded and rounded == [one for one in late if one.link > Link.ZERO_GRADIENT]:
        why = "an update below half a unit in the last place of a weight is lost"
        fix = "keep the weights in float32, `model.float()`, and use `torch.autocast` for speed"
        yield _broken(record, rounded, history.line, f"{_named(record, rounded)} do not change: updates round to zero", fix, why)
    still = [one for one in late if one.link in {Link.UNMOVED, Link.BARELY_MOVED}]
    losses = history.losses()
    is_falling = falls(losses) and fall_of(losses)[0] > _NO_DROP * abs(losses[0])
    if not still or furthest is Link.NONE or history.is_winding_down or is_falling:
        return
    rate, ratio, loss = history.steps[-1].rate, max(one.ratio_max for one in still), abs(losses[0] / history.factor) if losses else 0.0
    change = f"change by at most {ratio:.0e} of their norm per update" if ratio else "do not change"
    what = f"the weights of {_named(record, still)} {change}"
    if rate <= _TINY_RATE:
        where, fix = _rated(history, rate, max((one.ratio_max for one in still if one.is_matrix), default=ratio))
        yield _broken(
            record,
            still,
            where or history.line,
            what,
            fix,
            "the gradients are not zero, but the updates are too small to change the model",
            ratio,
        )
    elif max(one.norm_max for one in still) < _TINY_GRADIENT and loss > _NOT_CONVERGED:
        wrapped = _around_loss(history.backward_line)
        where, fix = (wrapped[0], wrapped[1]) if wrapped else (None, "remove what makes the loss so small before `backward()`")
        why = f"all gradients are below {_TINY_GRADIENT:.0e}, because the loss is scaled down"
        yield _broken(record, still, where or history.backward_line, f"{what}: the gradients are too small", fix, why, ratio)


def ascending(record: RunRecord, history: GradientHistory, modules: list[ModuleSeries]) -> Iterator[GradFinding]:
    """A criterion that has a least value, and that every update increases; not of a GAN, where one model may work against another."""
    is_alone = len([one for one in record.histories if one.steps_count > 1]) <= 1 and all(one.owner.model >= 0 for one in modules)
    values = [abs(loss / history.factor) for loss in history.losses()]
    if not is_alone or not history.factor < 0 or len(values) < _FEW_UPDATES or not falls([-value for value in values]):
        return
    rise, made = f"from {number(values[0])} to {number(values[-1])}", None
    for place, call in _optimizer_calls(history):
        kept = [keyword for keyword in call.keywords if keyword.arg != "maximize"]
        if len(kept) < len(call.keywords):
            made = place, f"use `{ast.unparse(ast.Call(call.func, call.args, kept))}` in place of `{ast.unparse(call)}`"
    advice = None, "call `backward()` on the loss, not on its negative, with an optimizer that minimizes it"
    where, fix = made or _around_loss(history.backward_line) or advice
    yield finding(
        "ascending",
        where or history.backward_line,
        step=history.steps[0].number,
        value=values[-1],
        headline=f"the updates increase the loss, {rise} in {plural(len(values), 'step')}",
        fix=fix,
        explanation=f"`{history.name}` maximizes the loss" if made is not None else "backward() is called on the negative of the loss",
    )


def clips_nothing(_: RunRecord, history: GradientHistory, _modules: list[ModuleSeries]) -> Iterator[GradFinding]:
    """Clipping after an update or before the backward pass: of gradients that no update uses any more."""
    clips = history.early_clips
    if len(clips) < _FEW_UPDATES or len(clips) < history.clipping_steps_count or history.line is None:
        return
    clip, backward = clips[-1], history.backward_line
    is_before = backward is not None and backward.file == clip.file and clip.line < backward.line
    yield finding(
        "clipped_never",
        clip,
        step=history.steps[0].number,
        value=float(len(clips)),
        headline=f"clipping has no effect: it is called {'before backward()' if is_before else f'after `{history.name}.step()`'}",
        fix=f"move `{_code(clip, 'clip')}` before `{_code(history.line, 'step')}`",
        explanation="it belongs between backward() and the update: there alone it changes the gradients that the update uses",
    )


def _broken(
    record: RunRecord,
    chains: Sequence[ParameterSteps],
    where: Line | Location | None,
    headline: str,
    fix: str,
    why: str,
    value: float = 0.0,
) -> GradFinding:
    """A link that breaks, for all parameters that it concerns."""
    modules = tuple(dict.fromkeys(record.owners.name(one.owner) for one in chains))
    return finding("not_learning", where, modules, step=0, value=value, headline=headline, fix=fix, explanation=why)


def _named(record: RunRecord, chains: Sequence[ParameterSteps]) -> str:
    """Their modules, or the variables of tensors that are in none."""
    names = list(dict.fromkeys(f"`{name}`" if (name := record.owners.name(one.owner)) else "the model" for one in chains))
    return plural(len(names), "tensor") + " of no module" if any(name.startswith("`tensor ") for name in names) else listed(names)


def finding(
    kind: GradKind, line: Line | Location | None, modules: tuple[str, ...] = (), *, module: str | None = None, **fields: Any
) -> GradFinding:
    """At a line; unless another one is named, the first of several modules is the one to look at."""
    where = line.location if isinstance(line, Line) else line
    first = modules[0] if modules and module is None else module
    return GradFinding(kind=kind, location=where, excerpt=excerpt(where) if where else (), module=first, modules=modules, **fields)


def rounded(value: float) -> float:
    """To one significant digit."""
    return float(f"{value:.0e}") if math.isfinite(value) and value > 0 else value


def learning_rate(history: GradientHistory, *, ratio: float | None = None, factor: float | None = None) -> str:
    """A learning rate that gives updates of the usual size, or one changed by a factor."""
    rate = history.steps[-1].rate if history.steps else math.nan
    factor = USUAL_RATIO / ratio if factor is None and ratio else factor or 0.1
    groups = f"for group in {history.name}.param_groups"
    if not rate > 0 or not math.isfinite(rate * factor):
        return f'set the learning rate: `{groups}: group["lr"] = 1e-3`'
    word, new = "lower" if factor < 1 else "raise", rounded(rate * factor)
    return f'{word} the learning rate from {number(rate)} to {number(new)}: `{groups}: group["lr"] = {new:g}`'


def _rated(history: GradientHistory, rate: float, ratio: float) -> _Fix:
    """Another learning rate where the optimizer is made with this one; or the schedule that has set it."""
    new = rounded(rate * USUAL_RATIO / ratio) if rate and ratio else _DEFAULT_RATE

    def is_rate(name: str | None, value: ast.AST | None) -> bool:
        return name == "lr" and isinstance(value, ast.Constant) and value.value == rate

    def exchange(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.keyword) and is_rate(node.arg, node.value):
            return ast.keyword("lr", ast.Constant(new))
        if not isinstance(node, ast.Dict):
            return None
        pairs = [(getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True)]
        values = [ast.Constant(new) if is_rate(key, value) else value for key, value in pairs]
        return ast.Dict(node.keys, values) if any(is_rate(*pair) for pair in pairs) else None

    for where, made in _optimizer_calls(history):
        call = exchanged(made, exchange)
        call.args[1:] = [ast.Constant(new) if is_rate("lr", value) else value for value in call.args[1:]]
        if not same(call, made):
            return where, f"{'raise' if rate else 'set'} the learning rate: use `{ast.unparse(call)}` in place of `{ast.unparse(made)}`"
    for file, statement in _statements(history.line) if history.is_scheduled else ():
        for node in nodes(ast.Call, statement):
            if node.args and ast.unparse(node.args[0]) == history.name and hasattr(torch.optim.lr_scheduler, called(node)):
                return location(file, statement.lineno, "<module>"), f"let `{ast.unparse(node)}` give a larger learning rate, or remove it"
    return None, learning_rate(history, ratio=ratio or None, factor=None if ratio else math.inf)


def _optimizer_calls(history: GradientHistory) -> Iterator[tuple[Location, ast.Call]]:
    """Where an optimizer is made: the last call of its class for its name, else the only one."""
    calls = [(file, statement, node) for file, statement in _statements(history.line) for node in nodes(ast.Call, statement)]
    made = [one for one in calls if called(one[2]) == history.kind]
    named = [one for one in made if history.name in map(last_name, targets_of(one[1]))]
    for file, statement, node in named[:1] or (made if len(made) == 1 else []):
        yield location(file, statement.lineno, "<module>"), node


def _around_loss(line: Line | None) -> _Fix | None:
    """The loss itself in place of its negative or of a multiple of it, where backward() is called or where the loss is computed."""
    calls = [] if line is None else list(nodes(ast.Call, statement_at(tree_of(line.file), line.line)))
    expr = next((one.func.value for one in calls if method(one) == "backward" and isinstance(one.func, ast.Attribute)), None)
    if line is None or expr is None:
        return None
    file, at = line.file, line.line
    if isinstance(expr, ast.Name):
        name = expr.id
        made = [(one, other) for one, other in _statements(line) if name in map(last_name, targets_of(other)) and one == file]
        made = [one for one in made if one[1].lineno < at]
        if not made or not isinstance(made[0][1], ast.Assign):
            return None
        at, expr = made[0][1].lineno, made[0][1].value
    inner: ast.expr | None = None
    match expr:
        case ast.UnaryOp(ast.USub(), inner) | ast.BinOp(inner, ast.Div() | ast.Mult(), _):
            if isinstance(expr, ast.BinOp) and isinstance(inner, (ast.Constant, ast.UnaryOp)):
                inner = expr.right
    return None if inner is None else (location(file, at, line.function), f"use `{ast.unparse(inner)}` in place of `{ast.unparse(expr)}`")


def _thawed(history: GradientHistory, frozen: Sequence[ParameterSteps]) -> _Fix:
    """Where parameters are frozen, or where a tensor is made that is to be trained."""
    loose = [one.owner.path for one in frozen if one.owner.model < 0]
    for file, statement in _statements(history.line):
        where = location(file, statement.lineno, "<module>")
        if loose:
            if loose[0] in map(last_name, targets_of(statement)):
                return where, f"after this line, call `{loose[0]}.requires_grad_()`"
            continue
        for call in nodes(ast.Call, statement):
            if method(call) == "requires_grad_" and ast.unparse(call).endswith("(False)"):
                code = ast.unparse(call)
                return where, f"use `{code.removesuffix('(False)')}(True)` in place of `{code}`"
        if ast.unparse(statement).endswith(".requires_grad = False"):
            return where, f"use `{ast.unparse(statement).removesuffix('False')}True` in place of `{ast.unparse(statement)}`"
    return None, "set `requires_grad` of what is to be trained to True"


def _not_zero(history: GradientHistory, path: str) -> _Fix:
    """Random values for a parameter of zeros, where these are given, or where it is made."""
    for file, statement in _statements(history.line):
        where = location(file, statement.lineno, "__init__")
        for call in nodes(ast.Call, statement):
            if called(call) == "zeros_" and call.args and path.endswith(ast.unparse(call.args[0]).removeprefix("self.")):
                code = ast.unparse(call)
                return where, f"use `{code.replace('zeros_(', 'normal_(').removesuffix(')')}, std=0.02)` in place of `{code}`"
        for target in targets_of(statement):
            if isinstance(target, ast.Attribute) and target.attr == path.rpartition(".")[2]:
                return where, f"after this line, call `torch.nn.init.normal_({ast.unparse(target)}, std=0.02)`"
    return None, f"give `{path}` random values with `torch.nn.init.normal_`"


def _paths(record: RunRecord, chains: Sequence[ParameterSteps]) -> list[str]:
    """The names of parameters, as in `named_parameters()`."""
    tables = [module._parameters for module in live_modules()]
    known = {id(tensor): name for table in tables for name, tensor in list(table.items())}
    return [f"{record.owners.name(one.owner)}.{known.get(id(one.parameter()), '')}".strip(".") for one in chains]


def _code(line: Line | None, word: str) -> str:
    """The statement at a line that has the word, without a comment."""
    tree = None if line is None else tree_of(line.file)
    codes = [ast.unparse(one) for one in nodes(ast.stmt, tree) if line is not None and one.lineno == line.line and not hasattr(one, "body")]
    return next((code for code in codes if word in code), "")


def _statements(line: Line | None) -> Iterator[tuple[str, ast.stmt]]:
    """(file, statement) of the user's code without those that have a body: in the file of a line, then in the cells, the last one first."""
    files = [] if line is None else [line.file]
    for file in dict.fromkeys([*files, *(cell.where.file for cell in cells())]):
        for statement in sorted(nodes(ast.stmt, tree_of(file)), key=lambda node: -node.lineno):
            if not hasattr(statement, "body"):
                yield file, statement


def falls(losses: Sequence[float]) -> bool:
    """Whether the mean of the second half is lower, by more than chance."""
    if len(losses) < 4:  # noqa: PLR2004 - of which no half has a deviation
        return False
    drop, error = fall_of(losses)
    return drop > 2 * error and drop > 0


def fall_of(losses: Sequence[float]) -> tuple[float, float]:
    """(by how much the mean of the second half is lower, its standard error)."""
    first, second = losses[: len(losses) // 2], losses[len(losses) // 2 :]
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(second) / len(second))
    return statistics.fmean(first) - statistics.fmean(second), error
