"""Schedules of the learning rate: of another optimizer, in another rhythm than the training, begun anew beside what continues."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

from torchdebug_magics.format import number
from torchdebug_magics.instruments.gradwatch.record import GradientHistory
from torchdebug_magics.instruments.gradwatch.repairs import finding
from torchdebug_magics.instruments.gradwatch.report import GradFinding
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.names import user_variables, variable_of
from torchdebug_magics.probing.source.edited_source import Source, exchanging, made_as, statements
from torchdebug_magics.probing.source.syntax import (
    FUNCTIONS,
    called,
    copied,
    dotted,
    enclosing,
    last_name,
    loops_around,
    method,
    nodes,
    targets_of,
    tree_of,
)
from torchdebug_magics.report import Edit, Location

_HORIZONS = {"OneCycleLR": "total_steps", "CosineAnnealingLR": "T_max"}
"""The attribute that says in how many steps a schedule comes to its end."""
_LEAST_STEPS, _LEAST_RATIO = 20, 3
_NEAR = 0.02
"""Share by which the length of a schedule may differ from the updates, or epochs, that it was made for."""


class _Schedule(NamedTuple):
    name: str
    """Its variable, or the attribute that holds it."""
    scheduler: schedulers.LRScheduler
    history: GradientHistory
    """Of its optimizer."""


def unscheduled(histories: Sequence[GradientHistory]) -> Iterator[GradFinding]:
    """Two schedulers of one class on one optimizer, where the name of one of them goes with another optimizer, which has none."""
    objects = list({id(value): (name, value) for name, value in reversed(list(user_variables()))}.values())  # by their first names
    known = [(name, value) for name, value in objects if isinstance(value, schedulers.LRScheduler)]
    scheduled = {id(scheduler.optimizer) for _, scheduler in known}
    names = {id(value): name for name, value in objects if isinstance(value, Optimizer)}
    idle = [history for history in histories if history.name in {names[key] for key in names.keys() - scheduled}]
    for (first, earlier), (second, later) in combinations(known, 2):
        name = names.get(id(earlier.optimizer), "")
        if earlier.optimizer is not later.optimizer or type(earlier) is not type(later) or len(idle) != 1 or not name:
            continue
        own = {*idle[0].name.split("_")} - {*name.split("_")}
        meant = [scheduler for scheduler in (first, second) if own & {*scheduler.split("_")}]
        for where, call in made_as(idle[0].file, meant[0], type(earlier).__name__) if len(meant) == 1 else ():
            new = ast.Call(call.func, [_renamed(part, name, idle[0].name) for part in call.args], call.keywords)
            headline = f"`{first}` and `{second}` both set the learning rate of `{name}`, and none that of `{idle[0].name}`"
            why = f"each of the two multiplies the learning rate of `{name}`, which falls twice as often as meant"
            edits = exchanging(where, call, new)
            state = "compiles" if edits else "advice"
            yield finding(idle[0], "unscheduled", where, f"`{ast.unparse(new)}`", headline=headline, why=why, edits=edits, fix_state=state)
            return


def _renamed(part: ast.expr, old: str, new: str) -> ast.expr:
    return ast.Name(new) if isinstance(part, ast.Name) and part.id == old else part


def mistimed(histories: Sequence[GradientHistory]) -> Iterator[GradFinding]:
    """Of a training that is over: schedules that are too long or too short for it, and one that does not know that it goes on."""
    trained = {
        id(optimizer): each for each in histories if each.is_scheduled and each.steps and (optimizer := each.optimizer()) is not None
    }
    known = live(schedulers.LRScheduler) if trained else []
    parts = {id(part) for scheduler in known for part in getattr(scheduler, "_schedulers", ())}
    for scheduler in known:
        history = trained.get(id(scheduler.optimizer))
        is_alone = id(scheduler) not in parts and sum(other.optimizer is scheduler.optimizer for other in known) == 1
        if history is not None and is_alone:
            schedule = _Schedule(_name_of(history, scheduler), scheduler, history)
            fault = _resumed(schedule) or _in_other_rhythm(schedule) or _rising(schedule)
            if fault is not None:
                yield fault
                return


def _name_of(history: GradientHistory, scheduler: schedulers.LRScheduler) -> str:
    """What the user's code calls it."""
    if (variable := variable_of(scheduler)) is not None:
        return variable
    made = (statement for _, statement in statements(history.file) if isinstance(statement, ast.Assign))
    kinds = [statement for statement in made if called(statement.value) == type(scheduler).__name__]
    return dotted(kinds[0].targets[0]) or "scheduler" if kinds else "scheduler"


def _in_other_rhythm(schedule: _Schedule) -> GradFinding | None:
    """A schedule that was made for all updates, and steps once an epoch; or for all epochs, and steps at each update."""
    name, scheduler, history = schedule
    length, count, updates = (
        getattr(scheduler, _HORIZONS.get(type(scheduler).__name__, ""), None),
        scheduler.last_epoch,
        history.steps_count,
    )
    line = next((place for place, call in _steps(history) if dotted(call.func) == f"{name}.step"), None)
    made = next((call for _, call in made_as(history.file, name.rpartition(".")[2], type(scheduler).__name__)), None)
    if not isinstance(length, int) or line is None or made is None or updates < _LEAST_STEPS or count < 1:
        return None
    loops = loops_around(tree_of(line.file), line.line)
    ranges = [loop.iter for loop in loops[:1] if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call)]
    rounds = [ast.unparse(each.args[-1]) for each in ranges if called(each) == "range" and each.args]
    given = [ast.unparse(value) for value in (*made.args, *(option.value for option in made.keywords))]
    is_slow = abs(length - updates) <= _NEAR * updates and count * _LEAST_RATIO <= updates and any("len(" in text for text in given)
    is_fast = abs(count - updates) <= _NEAR * updates and length * _LEAST_RATIO <= count and len(loops) > 1 and rounds[:1] == given[1:2]
    if not is_slow and not (is_fast and isinstance(scheduler, schedulers.CosineAnnealingLR)):
        return None
    headline = f"`{name}` is made for {length:,} steps, and makes {count:,}"
    if not is_slow:
        fix, edits = f"move `{name}.step()` out of the loop over batches: it is meant once an epoch", _moved_out(line)
        why = f"the learning rate comes to its end after {length:,} of {updates:,} updates, and rises again"
    else:
        fix, edits = f"move `{name}.step()` into the loop over batches, after `{history.name}.step()`", _moved_to(line, history.line)
        why = f"its length is the number of updates, {updates:,}, of which it sees one in {round(updates / count):,}"
    return _finding(history, line, fix, headline, why, edits)


def _finding(history: GradientHistory, where: Location | None, fix: str, headline: str, why: str, edits: Sequence[Edit]) -> GradFinding:
    state = "compiles" if edits else "advice"
    return finding(history, "mistimed", where, fix, headline=headline, why=why, edits=tuple(edits), fix_state=state)


def _steps(history: GradientHistory) -> Iterator[tuple[Location, ast.Call]]:
    for where, statement in statements(history.file):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and method(statement.value) == "step":
            yield where, statement.value


def _moved_out(line: Location) -> tuple[Edit, ...]:
    """The statement behind the innermost loop around it."""
    source = _source_at(line)
    loops = [] if source is None else loops_around(source.tree, source.line)
    if (
        source is None
        or source.statement is None
        or not loops
        or source.statement not in loops[-1].body[1:]
        or not source.is_alone(source.statement)
    ):
        return ()
    return source.merged((source.replacing(source.statement, ""), source.after(loops[-1], source.text(source.statement))))


def _moved_to(line: Location, update: object) -> tuple[Edit, ...]:
    """The statement behind that of the update, in the same file."""
    source = _source_at(line)
    where = getattr(update, "location", None)
    if source is None or source.statement is None or where is None or where.file != line.file or len(source.block_of(source.statement)) < 2:  # noqa: PLR2004
        return ()
    at_update = source.at(where.line)
    if at_update is None or not source.is_alone(at_update) or not source.is_alone(source.statement):
        return ()
    return (
        ()
        if at_update is None
        else source.merged((source.replacing(source.statement, ""), source.after(at_update, source.text(source.statement))))
    )


def _source_at(where: Location) -> Source | None:
    tree = tree_of(where.file)
    return None if tree is None else Source(where, tree)


def _rising(schedule: _Schedule) -> GradFinding | None:
    """A linear schedule that raises the learning rate in all steps, whose end was left to the default: else that is meant."""
    name, scheduler, history = schedule
    is_whole = isinstance(scheduler, schedulers.LinearLR) and scheduler.last_epoch == scheduler.total_iters >= _LEAST_STEPS
    if not is_whole or not isinstance(scheduler, schedulers.LinearLR) or "warm" in name.lower():
        return None  # a warm-up rises, too, and is a part of a training
    first, last = scheduler.start_factor, scheduler.end_factor
    rates = [group["lr"] for group in scheduler.optimizer.param_groups]
    if not first < last or len({*rates}) != 1:
        return None
    for where, call in made_as(history.file, last_name(ast.parse(name, mode="eval").body), "LinearLR"):
        bound = inspect.signature(schedulers.LinearLR).bind_partial(
            *call.args, **{option.arg or "": option.value for option in call.keywords}
        )
        if (
            "start_factor" not in bound.arguments
            or "end_factor" in bound.arguments
            or {"", None} & {option.arg for option in call.keywords}
        ):
            continue
        new = copied(call)
        new.args = new.args[:1]
        turned = {"start_factor": ast.Constant(float(last)), "end_factor": ast.Constant(float(first))}
        options = {option.arg: option.value for option in new.keywords} | turned | {"total_iters": bound.arguments.get("total_iters")}
        new.keywords = [ast.keyword(arg, value) for arg, value in options.items() if value is not None]
        begin = rates[0] / (first + (last - first) * scheduler.last_epoch / scheduler.total_iters) * first
        headline = f"`{name}` raises the learning rate in all {scheduler.last_epoch:,} steps, from {number(begin)} to {number(rates[0])}"
        fix = f"to lower it, write `{ast.unparse(new)}`; as a warm-up, give it fewer steps"
        return _finding(history, where, fix, headline, "`LinearLR` goes from `start_factor` to `end_factor`", exchanging(where, call, new))
    return None


def _resumed(schedule: _Schedule) -> GradFinding | None:
    """A scheduler that counts from 0 where its optimizer continues from a checkpoint, which has no state of a scheduler."""
    name, scheduler, history = schedule
    rates = [group["lr"] for group in scheduler.optimizer.param_groups]
    known = getattr(scheduler, "_get_closed_form_lr", None)
    expected = [*known()] if known is not None else rates
    if all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(expected, rates, strict=True)):
        return None
    own = [(where, statement) for where, statement in statements(history.file)]
    if any("'lr'" in ast.unparse(target) for _, statement in own for target in targets_of(statement)):
        return None  # it is set by hand
    loads = [(where, call) for where, statement in own for call in nodes(ast.Call, statement) if method(call) == "load_state_dict"]
    owners = [(where, call, dotted(call.func).rpartition(".")[0]) for where, call in loads]
    of_optimizer = [(where, call, owner) for where, call, owner in owners if _is_named(owner, history.name)]
    if not of_optimizer or any(_is_named(owner, name) for _, _, owner in owners):
        return None
    where, load, owner = of_optimizer[0]
    functions = {node.name for node in enclosing(tree_of(where.file), where.line) if isinstance(node, FUNCTIONS)}
    if functions and not functions & {called(call) for _, statement in own for call in nodes(ast.Call, statement)}:
        return None  # nothing calls it
    saved = [(place, node) for place, statement in own for node in nodes(ast.Dict, statement)
             if any(f"{owner}.state_dict()" == ast.unparse(value) for value in node.values)]  # fmt: skip
    key = ast.Constant("scheduler")
    fix = f"save `{name}.state_dict()` with the checkpoint, and load it where `{owner}` is loaded"
    edits: tuple[Edit, ...] = ()
    argument = load.args[0] if load.args else None
    here = name if all(_reads(place, name) for place in (where, *(place for place, _ in saved[:1]))) else ""
    if here and len(saved) == 1 and isinstance(argument, ast.Subscript):
        place, table = saved[0]
        whole = ast.Dict([*table.keys, key], [*table.values, ast.parse(f"{here}.state_dict()", mode="eval").body])
        source = _source_at(where)
        loading = f"{here}.load_state_dict({ast.unparse(ast.Subscript(argument.value, key))})"
        if source is not None and source.statement is not None and source.is_alone(source.statement):
            edits = (*exchanging(place, table, whole), source.after(source.statement, loading))
            fix = f"put `{here}.state_dict()` into the checkpoint as well, and run `{loading}` after `{ast.unparse(load)}`"
    headline = f"`{name}` counts from 0 again, where `{owner}` continues from a checkpoint"
    why = f"after {scheduler.last_epoch:,} steps, its learning rate would be {number(expected[0])}, and is {number(rates[0])}"
    return _finding(history, where, fix, headline, why, edits if len(edits) > 1 else ())


def _is_named(owner: str, name: str) -> bool:
    """Whether what the code calls `owner` is the variable, or an attribute of that name."""
    return owner.rpartition(".")[2] == name.rpartition(".")[2]


def _reads(where: Location, name: str) -> bool:
    """Whether the name can be read at a line: a variable of the notebook, or of the function there."""
    functions = [node for node in enclosing(tree_of(where.file), where.line) if isinstance(node, FUNCTIONS)]
    given = {argument.arg for function in functions for argument in nodes(ast.arg, function.args)}
    return name.partition(".")[0] in given | {variable for variable, _ in user_variables()}
