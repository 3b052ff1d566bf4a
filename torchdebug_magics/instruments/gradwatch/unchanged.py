"""What no update has changed, or not as it was meant: the first link that breaks on the way from the loss to it, and its repair as code."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchdebug_magics.format import listed, number, plural
from torchdebug_magics.instruments.gradwatch.record import GradientHistory, Link, ParameterSteps, RunRecord
from torchdebug_magics.instruments.gradwatch.report import GradFinding, GradKind
from torchdebug_magics.probing.modules import live_modules
from torchdebug_magics.probing.source.edited_source import cells, made_later, same
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import (
    called,
    exchanged,
    last_name,
    loops_around,
    method,
    names_in,
    nodes,
    statement_at,
    targets_of,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import excerpt, location
from torchdebug_magics.report import Edit, Location

USUAL_RATIO = 1e-3
"""Usual ratio of update norm to weight norm."""
_DEFAULT_RATE = 1e-3
_FEW_UPDATES, _STILL_STEPS, _TINY_RATE = 3, 20, 1e-5
_TINY_GRADIENT, _NOT_CONVERGED = 1e-7, 1e-3
"""Norm of a gradient that is too small for a loss that is above the second one."""
_NO_DROP = 0.005
_Fix = tuple[Location | None, str]


class _Broken(NamedTuple):
    """A link that breaks: what to say of it."""

    where: Line | Location | None
    headline: str
    fix: str
    why: str
    chains: Sequence[ParameterSteps] = ()
    """The parameters that it concerns, where these are not all."""
    value: float = 0.0
    edits: tuple[Edit, ...] = ()


def unchanged(record: RunRecord, history: GradientHistory) -> Iterator[GradFinding]:
    """What no update has changed, or not as it was meant, by the first link that breaks between the loss and a changed parameter."""
    looks: tuple[tuple[GradKind, Callable[[RunRecord, GradientHistory], _Broken | None]], ...] = (
        ("not_learning", _broken),
        ("ascending", _ascending),
        ("clipped_never", _clips_nothing),
    )
    for kind, broken in ((kind, look(record, history)) for kind, look in looks):
        if broken is not None:
            yield finding(
                kind,
                broken.where or history.line,
                tuple(dict.fromkeys(record.owners.name(one.owner) for one in broken.chains)),
                step=0,
                value=broken.value,
                headline=broken.headline,
                fix=broken.fix,
                edits=broken.edits,
                fix_state="compiles" if broken.edits else "advice",
                explanation=broken.why,
            )


def _broken(record: RunRecord, history: GradientHistory) -> _Broken | None:  # noqa: PLR0911 - one for each link
    name, step = history.name, f"`{history.name}.step()`"
    furthest = max((one.link for one in history.chains.values()), default=Link.NONE)
    chains = [one for one in history.chains.values() if one.steps_count >= _FEW_UPDATES and one.link is not Link.NONE]
    # A part of a model may be frozen, or not used, on purpose; a tensor outside of every module is held to be trained.
    loose = [one for one in chains if one.owner.model < 0 and furthest is Link.NONE and one.link <= Link.WITHOUT_GRADIENT]
    if frozen := [one for one in loose or chains if one.link is Link.FROZEN and (loose or furthest is Link.FROZEN)]:
        where, fix = _thawed(history, frozen)
        headline = f"{_named(record, frozen)} {'is' if len(frozen) == 1 else 'are'} not trained: `requires_grad` is False"
        return _Broken(where, headline, fix, f"{step} changes only tensors that get a gradient", frozen)
    if furthest in {Link.WITHOUT_GRADIENT, Link.ZERO_GRADIENT} and history.zeroed is not None and chains:
        fix = f"move `{_code(history.zeroed, 'zero_grad')}` before `{_code(history.backward_line, 'backward')}`"
        headline = f"the gradients are zeroed between backward() and {step}"
        return _Broken(history.zeroed, headline, fix, "the update finds no gradient, and changes nothing", chains)
    cut = loose or (chains if furthest is Link.WITHOUT_GRADIENT else [])
    if cut and history.backward_line is not None:
        made = next((place for place, _ in _optimizer_calls(history)), None)
        fix, edits = made_later(made, history.line.line if history.line is not None else 0)
        fix = fix or "create it after the model has all its parameters; `%%autograd` above this cell names a line that cuts the graph"
        headline = f"`{name}` updates {_named(record, cut)}, on which the loss does not depend"
        why = "an optimizer updates the tensors that it was created with, and only those that get a gradient"
        return _Broken(made, headline, fix, why, cut, edits=edits)
    zero = [one for one in chains if one.link is Link.ZERO_GRADIENT and one.is_zero and one.is_matrix]
    if len(zero) > 1:
        paths = _paths(record, zero)
        where, fix = _not_zero(history, paths[0])
        headline = f"{listed([f'`{path}`' for path in paths])} are all zero, and so are their gradients"
        why = "where tensors are multiplied, the gradient of each has the other as a factor: both stay zero for ever"
        return _Broken(where, headline, fix, why, zero)
    late = [one for one in chains if one.steps_count >= _STILL_STEPS and not history.is_warming_up]
    if unrated := [one for one in late if one.link is Link.ZERO_RATE]:
        headline = f"weights of {_modules(record, unrated)} do not change: the learning rate is 0"
        where, fix = _rated(history, 0.0, 0.0)
        return _Broken(where, headline, fix, "the gradients are not zero, but each update is", unrated)
    if rounding := [one for one in late if one.link is Link.UNMOVED and one.is_half and one.is_matrix]:
        fix = "keep the weights in float32, `model.float()`, and use `torch.autocast` for speed"
        headline = f"weights of {_modules(record, rounding)} do not change: updates round to zero"
        return _Broken(None, headline, fix, "an update below half a unit in the last place of a weight is lost", rounding)
    still = [one for one in late if one.link in {Link.UNMOVED, Link.BARELY_MOVED}]
    moved = max((one.link for one in history.chains.values() if one.is_matrix), default=furthest) is Link.NONE
    return None if moved or not still else _barely_moved(record, history, still)


def _barely_moved(record: RunRecord, history: GradientHistory, still: list[ParameterSteps]) -> _Broken | None:
    """Updates that change next to nothing, although there are gradients, in a training that does not improve."""
    losses = history.losses()
    if history.is_winding_down or (falls(losses) and fall_of(losses)[0] > _NO_DROP * abs(losses[0])):
        return None
    rate, ratio = history.steps[-1].rate, max(one.ratio_max for one in still)
    change = f"change by at most {ratio:.0e} of their norm per update" if ratio else "do not change"
    headline = f"weights of {_modules(record, still)} {change}"
    if rate <= _TINY_RATE:
        where, fix = _rated(history, rate, max((one.ratio_max for one in still if one.is_matrix), default=ratio))
        why = "the gradients are not zero, but the updates are too small to change the model"
        return _Broken(where, headline, fix, why, still, ratio)
    is_converged = not losses or not abs(losses[0] / history.factor) > _NOT_CONVERGED
    if is_converged or max(one.norm_max for one in still) >= _TINY_GRADIENT:
        return None
    where, fix = _around_loss(history.backward_line) or (None, "remove what makes the loss small before `backward()`")
    why = f"all gradients are below {_TINY_GRADIENT:.0e}, because the loss is scaled down"
    return _Broken(where or history.backward_line, f"{headline}: the gradients are too small", fix, why, still, ratio)


def _ascending(record: RunRecord, history: GradientHistory) -> _Broken | None:
    """A criterion that has a least value, and that every update increases; not of a GAN, where one model may work against another."""
    is_alone = len([one for one in record.histories if one.steps_count > 1]) <= 1 and all(
        one.owner.model >= 0 for one in history.chains.values()
    )
    values = [abs(loss / history.factor) for loss in history.losses()]
    if not is_alone or not history.factor < 0 or len(values) < _FEW_UPDATES or not falls([-value for value in values]):
        return None
    headline = f"the updates increase the loss, from {number(values[0])} to {number(values[-1])} in {plural(len(values), 'step')}"
    for where, call in _optimizer_calls(history):
        kept = [keyword for keyword in call.keywords if keyword.arg != "maximize"]
        if len(kept) < len(call.keywords):
            fix = _exchange(call, ast.Call(call.func, call.args, kept))
            return _Broken(where, headline, fix, f"`{history.name}` maximizes the loss", value=values[-1])
    around = _around_loss(history.backward_line)
    place, fix = around or (None, "call `backward()` on the loss, not on its negative, with an optimizer that minimizes it")
    return _Broken(place or history.backward_line, headline, fix, "backward() is called on the negative of the loss", value=values[-1])


def _clips_nothing(_: RunRecord, history: GradientHistory) -> _Broken | None:
    """Clipping after an update or before the backward pass: of gradients that no update uses any more."""
    clip, backward, count = history.early_clip, history.backward_line, history.early_clips_count
    if clip is None or not _FEW_UPDATES <= count >= history.clipping_steps_count:
        return None
    is_before = backward is not None and backward.file == clip.file and clip.line < backward.line
    headline = f"clipping has no effect: it is called {'before backward()' if is_before else f'after `{history.name}.step()`'}"
    fix = f"move `{_code(clip, 'clip')}` before `{_code(history.line, 'step')}`"
    why = "it belongs between backward() and the update: there alone it changes the gradients that the update uses"
    return _Broken(clip, headline, fix, why, value=float(count))


def _named(record: RunRecord, chains: Sequence[ParameterSteps]) -> str:
    """Their modules, or the variables of tensors that are in none."""
    names = list(dict.fromkeys(f"`{name}`" if (name := record.owners.name(one.owner)) else "the model" for one in chains))
    return plural(len(names), "tensor") + " of no module" if any(name.startswith("`tensor ") for name in names) else listed(names)


def _modules(record: RunRecord, chains: Sequence[ParameterSteps]) -> str:
    count = len({one.owner for one in chains})
    return _named(record, chains) if count == 1 else plural(count, "module")


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

    def raised(value: ast.expr) -> ast.expr:
        return ast.Constant(new) if isinstance(value, ast.Constant) and value.value == rate else value

    def exchange(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.keyword) and node.arg == "lr":
            is_variable = not isinstance(node.value, ast.Constant) and not history.is_scheduled
            return ast.keyword("lr", ast.Constant(new) if is_variable else raised(node.value))
        if isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values, strict=True))
            return ast.Dict(node.keys, [raised(one) if getattr(key, "value", None) == "lr" else one for key, one in pairs])
        return None

    for where, made in _optimizer_calls(history):
        call = exchanged(made, exchange)
        call.args[1:] = map(raised, call.args[1:])
        if not same(call, made):
            what = f"raise the learning rate from {number(rate)} to {number(new)}" if rate else "set the learning rate"
            return where, f"{what}: {_exchange(made, call)}"
    for where, node in _calls(history.line) if history.is_scheduled else ():
        if node.args and ast.unparse(node.args[0]) == history.name and hasattr(torch.optim.lr_scheduler, called(node)):
            return where, f"let `{ast.unparse(node)}` give a larger learning rate, or remove it"
    return None, learning_rate(history, ratio=ratio or None, factor=None if ratio else math.inf)


def _exchange(old: ast.AST, new: ast.AST | str) -> str:
    return f"use `{new if isinstance(new, str) else ast.unparse(new)}` in place of `{ast.unparse(old)}`"


def _optimizer_calls(history: GradientHistory) -> list[tuple[Location, ast.Call]]:
    """Where the optimizer is made: the last call of its class for its name, else the only one."""
    made = [(where, node) for where, node in _calls(history.line) if called(node) == history.kind]
    named = [one for one in made if history.name in map(last_name, targets_of(statement_at(tree_of(one[0].file), one[0].line)))]
    return named[:1] or (made if len(made) == 1 else [])


def _calls(line: Line | None) -> Iterator[tuple[Location, ast.Call]]:
    for where, statement in _statements(line):
        yield from ((where, node) for node in nodes(ast.Call, statement))


def _around_loss(line: Line | None) -> _Fix | None:
    """The loss itself in place of its negative or of a multiple of it, where backward() is called or where the loss is computed."""
    where, expr, name = None, None, ""
    for place, statement in _statements(line):
        if line is None or place.file != line.file or place.line > line.line:
            continue
        if place.line == line.line:
            calls = [one.func for one in nodes(ast.Call, statement) if method(one) == "backward"]
            where, expr = place, next((one.value for one in calls if isinstance(one, ast.Attribute)), None)
            name = expr.id if isinstance(expr, ast.Name) else ""
        elif name and isinstance(statement, ast.Assign) and name in map(last_name, statement.targets):
            where, expr = place, statement.value
            break
    match expr:
        case ast.UnaryOp(ast.USub(), inner) | ast.BinOp(ast.Constant() | ast.UnaryOp(), ast.Mult(), inner):
            return where, _exchange(expr, inner)
        case ast.BinOp(inner, ast.Div() | ast.Mult(), _):
            return where, _exchange(expr, inner)
    return None


def _thawed(history: GradientHistory, frozen: Sequence[ParameterSteps]) -> _Fix:
    """Where the parameters of the optimizer are frozen, or where a tensor is made that is to be trained."""
    loose = next((one.owner.path for one in frozen if one.owner.model < 0), "")
    held = {name for _, made in _optimizer_calls(history) for name in names_in(made)}
    fixes: list[tuple[_Fix, set[str]]] = []
    for where, statement in _statements(history.line):
        code = ast.unparse(statement)
        if loose and loose in map(last_name, targets_of(statement)):
            return where, f"after this line, call `{loose}.requires_grad_()`"
        if code.endswith((".requires_grad_(False)", ".requires_grad = False")):
            around = [loop.iter for loop in loops_around(tree_of(where.file), where.line) if isinstance(loop, ast.For)]
            fixes.append(((where, _exchange(statement, "True".join(code.rsplit("False", 1)))), names_in(statement, *around)))
    of_held = [fix for fix, names in fixes if names & held] or ([fixes[0][0]] if len(fixes) == 1 else [])
    return of_held[0] if of_held and not loose else (None, "set `requires_grad` of what is to be trained to True")


def _not_zero(history: GradientHistory, path: str) -> _Fix:
    """Random values for a parameter of zeros, where these are given, or where it is made."""
    for where, call in _calls(history.line):
        if called(call) == "zeros_" and call.args and path.endswith(ast.unparse(call.args[0]).removeprefix("self.")):
            return where, _exchange(call, f"{ast.unparse(call).replace('zeros_(', 'normal_(').removesuffix(')')}, std=0.02)")
    for where, statement in _statements(history.line):
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


def _statements(line: Line | None) -> Iterator[tuple[Location, ast.stmt]]:
    """The user's statements without a body: of the file of a line, then of the cells, the last one first."""
    files = [] if line is None else [line.file]
    for file in dict.fromkeys([*files, *(cell.where.file for cell in cells())]):
        for statement in sorted(nodes(ast.stmt, tree_of(file)), key=lambda node: -node.lineno):
            if not hasattr(statement, "body"):
                yield location(file, statement.lineno, "<module>"), statement


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
