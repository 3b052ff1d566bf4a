"""Parameters that are made anew in each step, a loss that is not; gradients that nothing keeps."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from itertools import pairwise

import torch

from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import edited, finding, statement_at
from torchdebug_magics.instruments.autograd.tape import Backward, OptimizerStep, RecordedOp
from torchdebug_magics.probing.names import user_names
from torchdebug_magics.probing.source.call_sites import value_of
from torchdebug_magics.probing.source.edited_source import calls, cells, statements
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import (
    FUNCTIONS,
    called,
    covers,
    enclosing,
    last_name,
    loops_around,
    names_in,
    nodes,
    targets_of,
    tree_of,
)

_FEWEST_PASSES = 3
_KEEPS = frozenset({"retain_grad", "requires_grad_", "register_hook"})


def remade_leaves(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Where the leaves at which gradients arrive are drawn between one backward pass and the next, time and again."""
    passes = [event for event in facts.course.backwards if event.is_recorded and event.ops]
    if len(passes) < _FEWEST_PASSES:
        return
    ops = {op.index: op for op in facts.tape.ops}
    first_writes: dict[int, RecordedOp] = {}
    for op in facts.tape.ops:
        for use in op.writes if op.initializes else ():
            first_writes.setdefault(use.memory, op)
    lines: list[set[Line]] = []
    persists = False
    for before, event in pairwise(passes):
        read = [use for index in event.ops if index in ops for use in ops[index].reads if use.is_leaf and use.requires_grad]
        persists = persists or any(use.memory not in first_writes or first_writes[use.memory].index < before.index for use in read)
        drawn = (first_writes[use.memory] for use in read if use.memory in first_writes)
        lines.append({line for op in drawn if op.index >= before.index and (line := _maker(op)) is not None})
    # Beside what lasts, as images that are trained through random networks, only a forward draws its layers anew by mistake.
    # What gathers shards makes leaves, too, and no module: the line itself must make one.
    common = {line for line in set.intersection(*lines) if (line.function == "forward" or not persists) and _made_at(line) is not None}
    if not common:
        return
    line = min(common, key=lambda line: line.line)
    what = ast.unparse(_made_at(line) or ast.Pass())
    where = f"each call of `{line.function}`" if line.function == "forward" else "each round of the loop"
    fix = f"make `{what}` once, {'in `__init__`, and call it in `forward`' if line.function == 'forward' else 'before the loop'}"
    why = "its parameters are drawn anew each time, so that nothing is learned: no update changes the next ones"
    yield finding("remade", f"`{what}` is made anew in {where}", line.location, fix, explanation=why)


def losses_made_once(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A loss that is computed before the loop, and each of whose backward passes gives the gradients at the first parameters."""
    events = facts.course.events
    passes = [at for at, event in enumerate(events) if isinstance(event, Backward) and event.is_recorded and event.node >= 0]
    for first, second, third in zip(passes, passes[1:], passes[2:], strict=False):
        same = {(event.node, event.line) for at in (first, second, third) if isinstance(event := events[at], Backward)}
        between = [
            [event for event in events[one:other] if isinstance(event, OptimizerStep)] for one, other in ((first, second), (second, third))
        ]
        where = events[first].where
        if len(same) > 1 or where is None or not all(between) or len({step.optimizer for steps in between for step in steps}) > 1:
            continue
        calls_here = [call.func for call in nodes(ast.Call, statement_at(where)) if isinstance(call.func, ast.Attribute)]
        name = next((ast.unparse(func.value) for func in calls_here if func.attr == "backward"), "")
        loops = loops_around(tree_of(where.file), where.line)
        bound = [
            (at, each) for at, each in statements(where.file) if isinstance(each, ast.Assign) and name in map(ast.unparse, each.targets)
        ]
        bound = [(at, each) for at, each in bound if at.file != where.file or not any(covers(loop, at.line) for loop in loops)]
        if not loops or not bound:
            continue
        made_at, made = bound[0]
        values = dict(user_names(sys._getframe()))
        read = [values.get(each) for each in names_in(made.value)]
        is_whole = not any(
            isinstance(value, torch.Tensor) and value.grad_fn is not None for value in read
        )  # nothing else is to be made anew
        yield finding(
            "stale_value",
            f"`{name}` was computed once, before the loop: each backward() gives the gradients of its first value",
            where,
            fix=f"compute `{name}`, and what it is computed from, inside the loop, before each backward()",
            edits=edited(where, ast.unparse(made), "before", loops[-1].body[0]) if is_whole else (),
            tensor=name,
            saved_at=made_at,
            explanation="`retain_graph=True` keeps the graph, and what it has saved; the updates since then have no part in it",
        )
        return


def unkept_gradients(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A variable whose ``.grad`` the code reads after backward(), though it was computed: autograd keeps gradients of leaves alone."""
    values = dict(user_names(sys._getframe())) if facts.course.backward_count else {}
    for where, statement in facts.statements() if values else ():
        for node in nodes(ast.Attribute, statement):
            if node.attr != "grad" or isinstance(node.ctx, ast.Store) or where.file != facts.files[0]:
                continue
            value = value_of(node.value, sys._getframe(), values)
            if not isinstance(value, torch.Tensor) or value.grad_fn is None or value.retains_grad:
                continue
            name, last = ast.unparse(node.value), last_name(node.value)
            in_function = any(isinstance(scope, FUNCTIONS) for scope in enclosing(tree_of(where.file), where.line))
            if in_function or any(called(call) in _KEEPS and last_name(_owner(call)) == last for _, call in calls(where.file)):
                continue
            loop = next(iter(loops_around(tree_of(where.file), where.line)), None)
            later = [at for at, each in statements(where.file) if name in map(ast.unparse, targets_of(each)) and at.file == where.file]
            if any(at.line > where.line or (loop is not None and covers(loop, at.line)) for at in later):
                continue  # what is held now is not what was read
            bound = [(at, each, target) for at, each in statements(where.file) for target in targets_of(each) if last_name(target) == last]
            # Of a module's attribute, the statement in its class.
            made = [(at, each, target) for at, each, target in bound if type(target) is type(node.value)]
            yield finding(
                "no_gradient",
                f"`{name}.grad` is None: `{name}` was computed, and only leaves keep their gradient",
                where,
                fix=f"call `{name}.retain_grad()` after it is computed, before backward()",
                edits=edited(made[0][0], f"{ast.unparse(made[0][2])}.retain_grad()", "after", made[0][1]) if made else (),
                tensor=name,
                saved_at=made[0][0] if made else None,
                explanation="the gradient of what is computed on the way is let go as soon as it is passed on",
                is_hint=True,
            )
            return


def _owner(call: ast.Call) -> ast.expr:
    return call.func.value if isinstance(call.func, ast.Attribute) else call


def _maker(op: RecordedOp) -> Line | None:
    """The line of a forward that makes the module, or else the one in a loop; None where it is made once."""
    for line in op.calls:  # the innermost first
        if line.function == "forward":
            return line
        if line.function != "__init__" and loops_around(tree_of(line.file), line.line):
            return line
    return None


def _made_at(line: Line) -> ast.Call | None:
    """The call in a line that makes a module: of a class of torch's, or of one that the user's code defines."""
    own = {node.name for place in (line.file, *(cell.where.file for cell in cells())) for node in nodes(ast.ClassDef, tree_of(place))}
    calls = nodes(ast.Call, statement_at(line.location))
    return next((call for call in calls if _makes_module(call) or called(call) in own), None)


def _makes_module(call: ast.Call) -> bool:
    kind = getattr(torch.nn, called(call), None)
    return isinstance(kind, type) and issubclass(kind, torch.nn.Module)
