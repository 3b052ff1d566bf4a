"""What the user's code names and never uses: a method without a call, an update that no condition lets run, a checkpoint, data."""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from torchdebug_magics.format import number
from torchdebug_magics.instruments.autograd.faults.data.seen_samples import FOR_EVALUATION
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding, Kind
from torchdebug_magics.instruments.autograd.source_readings import finding
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.names import user_names
from torchdebug_magics.probing.source.call_sites import value_of
from torchdebug_magics.probing.source.edited_source import Source, cells, exchanging, running_cell
from torchdebug_magics.probing.source.syntax import (
    FUNCTIONS,
    bound_names,
    called,
    copied,
    dotted,
    exchanged,
    last_name,
    nodes,
    own_nodes,
    root_of,
    targets_of,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.report import Edit

_FROM_DISK = frozenset({"load", "load_file", "load_state_dict_from_url", "load_url", "hf_hub_download"})
_EVALUATES = re.compile(
    r"(?:^|_)(?:test|val|valid|validation|eval)_?(?:acc|accuracy|loss|err|error|score|f1|auc|iou|dice|mse|mae|metric)s?(?:$|_)"
)


_UNCALLED: Mapping[str, Kind] = {
    "backward": "stepped_without_backward", "step": "never_stepped", "zero_grad": "never_zeroed", "eval": "eval_in_train_mode",
    "train": "train_in_eval_mode",
}  # fmt: skip


_COMPARES: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Eq: operator.eq,
}  # fmt: skip


class _Place(NamedTuple):
    """A statement of a cell."""

    cell: Source
    statement: ast.stmt


def uncalled_methods(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Statements of a training that name a method and do not call it: ``loss.backward``."""
    ran = _files(facts) if facts.course.backwards or facts.course.steps else set()
    variables = dict(user_names(sys._getframe())) if ran else {}
    for cell in (cell for cell in sources_of(facts) if cell.where.file in ran):
        probing = {id(node) for attempt in nodes(ast.Try, cell.tree) for part in attempt.body for node in ast.walk(part)}
        never = {id(node) for test in nodes(ast.If, cell.tree) if isinstance(test.test, ast.Constant) for node in ast.walk(test)}
        for statement in sorted(nodes(ast.Expr, cell.tree), key=lambda node: node.lineno):
            name = statement.value.attr if isinstance(statement.value, ast.Attribute) else ""
            owner = variables.get(root_of(statement.value))
            is_method = owner is None or isinstance(owner, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor))
            if id(statement) in probing | never or not is_method or isinstance(getattr(type(owner), name, None), property):
                continue
            if name in _UNCALLED and statement not in cell.tree.body[-1:]:  # the last line of a cell is shown
                code = cell.text(statement)
                yield finding(
                    _UNCALLED[name],
                    f"`{code}` calls nothing: it names the method",
                    location(cell.where.file, statement.lineno, "<module>"),
                    edits=(cell.replacing(statement, f"{code}()"),),
                    explanation="without parentheses, a statement only looks the method up",
                )


def unreached_updates(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """The updates of a cell that made none: they stand behind a condition that was false to the end."""
    if facts.course.backwards or facts.course.steps or not facts.tape.ops:
        return
    values = dict(user_names(sys._getframe()))
    sources = sources_of(facts)
    trees = [cell.tree for cell in sources]
    for cell, _ in running_cell():
        for guard in nodes(ast.If, cell.tree):
            called_there = {called(call) for part in guard.body for call in nodes(ast.Call, part)}
            if (
                guard.orelse
                or not isinstance(guard.test, ast.Compare)
                or not _leads_to("backward", called_there, trees)
                or isinstance(guard.test.ops[0], ast.Eq)
            ):
                continue
            sides = [_count_of(side, values) for side in (guard.test.left, *guard.test.comparators)]
            if len(sides) != 2 or not all(type(side) in {int, float} for side in sides) or _holds(guard.test, sides):  # noqa: PLR2004
                continue
            if (unreached := _unreached(cell, guard, sides, called_there, sources)) is not None:
                yield unreached
                return


def _leads_to(name: str, names: set[str], trees: list[ast.Module]) -> bool:
    """Whether one of the functions of these names, or one that they call, calls it."""
    known: dict[str, set[str]] = {}
    for function in nodes(FUNCTIONS, *trees):
        known.setdefault(function.name, set()).update(called(call) for call in nodes(ast.Call, function))
    reached = set[str]()
    while new := names - reached:
        reached |= new
        names = {inner for each in new for inner in known.get(each, ())}
    return name in reached


def _count_of(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """The number that a side of a comparison is at the end of the cell; None where that is not known."""
    is_length = isinstance(node, ast.Call) and called(node) == "len" and len(node.args) == 1
    value = value_of(node.args[0] if is_length and isinstance(node, ast.Call) else node, sys._getframe(), dict(values))
    if is_length:
        return len(value) if type(value) in {list, dict, tuple, set, deque} else None
    return value


def _holds(test: ast.Compare, sides: Sequence[Any]) -> bool:
    compare = _COMPARES.get(type(test.ops[0]))
    return compare is None or bool(compare(*sides))


def _unreached(cell: Source, guard: ast.If, sides: Sequence[Any], called_there: set[str], sources: list[Source]) -> AutogradFinding | None:
    """A count that only what its condition holds back would change goes before the condition; None for any other condition."""
    assert isinstance(guard.test, ast.Compare)
    test, counter = ast.unparse(guard.test), dotted(guard.test.left)
    counted = [
        (source, node)
        for source in sources
        for node in nodes(ast.AugAssign, source.tree)
        if last_name(node.target) == last_name(guard.test.left)
    ]
    edits: tuple[Edit, ...] = ()
    for source, node in counted if counter and len(counted) == 1 else ():
        around = [function for function in nodes(FUNCTIONS, source.tree) if node in ast.walk(function)]
        outside = {called(call) for tree in (each.tree for each in sources) for call in nodes(ast.Call, tree)} if not around else set()
        if around and around[-1].name in called_there and around[-1].name not in outside and len(around[-1].body) > 1:
            raised = f"{counter} {ast.unparse(node).removeprefix(ast.unparse(node.target)).lstrip()}"
            edits = (source.replacing(node, ""), cell.before(guard, raised))
    if not edits or "update" in counter:  # a buffer may have to be filled first; and who counts updates means no other steps
        return None
    return finding(
        "never_stepped",
        f"no update is made: `{test}` is never true",
        location(cell.where.file, guard.lineno, "<module>"),
        fix=f"move `{edits[1].new}` before the condition",
        edits=edits,
        explanation=f"`{counter}` is {number(sides[0])} at the end of the cell: only what the condition holds back changes it",
    )


def unread_checkpoints(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Weights that were read from a file, fit a model that was called and not trained, and that nothing reads."""
    if facts.course.steps_count:
        return  # they may be kept, to begin anew or to compare with
    variables = [(name, value) for name, value in user_names(sys._getframe()) if name.isidentifier()]
    called_models = {id(root()) for seen in facts.watched.recorder.root_calls.values() if (root := seen.root) is not None}
    models = [(name, value) for name, value in variables if isinstance(value, torch.nn.Module) and id(value) in called_models]
    files = sources_of(facts) if models else []
    reads = {node.id for cell in files for node in nodes(ast.Name, cell.tree) if isinstance(node.ctx, ast.Load)}
    loaded = {ast.unparse(call.func) for cell in files for call in nodes(ast.Call, cell.tree)}
    for (name, value), (model_name, model) in product(variables if files else (), models):
        if name in reads or f"{model_name}.load_state_dict" in loaded:
            continue
        for key, state in _states(value):
            made, built = _bound_at(files, name), _bound_at(files, model_name)
            if made is None or built is None or not _is_from_disk(made.statement) or not _is_of(state, model):
                continue
            last = max((made, built), key=lambda place: (place.cell.where.cell or 0, place.statement.lineno))
            code = f"{model_name}.load_state_dict({name if key is None else f'{name}[{key!r}]'})"
            where = location(made.cell.where.file, made.statement.lineno, "<module>")
            yield finding(
                "never_loaded",
                f"the weights in `{name}` are read from a file and put into no model",
                where,
                edits=(last.cell.after(last.statement, code),),
                fix=f"`{code}`",
                tensor=name,
                explanation=f"they fit `{model_name}`, which still has those that it was made with",
                is_hint=True,
            )
            return


def sources_of(facts: TrainingFacts) -> list[Source]:
    """The cells, the latest first, and the files of what was recorded."""
    known = list(cells())
    files = sorted(_files(facts) - {cell.where.file for cell in known})
    return known + [Source(location(file, 1, "<module>"), tree) for file in files if (tree := tree_of(file)) is not None]


def _files(facts: TrainingFacts) -> set[str]:
    """Of the lines that ran: a cell that was changed and run anew is there in its old form, too."""
    return {line.file for op in facts.tape.ops for line in op.calls}


def _states(value: Any) -> Iterator[tuple[str | None, Mapping[str, torch.Tensor]]]:
    """The states of models in a value: the value itself, or what it holds under a key."""
    for key, state in [(None, value), *(value.items() if isinstance(value, dict) else ())]:
        is_state = isinstance(state, Mapping) and state and all(isinstance(each, torch.Tensor) for each in state.values())
        if is_state and (key is None or isinstance(key, str)):
            yield key, state


def _is_of(state: Mapping[str, torch.Tensor], model: torch.nn.Module) -> bool:
    """Whether a state has the names and shapes of a model's, and other values."""
    own = model.state_dict()
    if own.keys() != state.keys() or any(own[name].shape != value.shape for name, value in state.items()):
        return False
    with modes_aside(), torch.no_grad():
        return any(not torch.equal(own[name].cpu(), value.cpu()) for name, value in state.items() if not value.is_meta)


def _is_from_disk(statement: ast.stmt) -> bool:
    return any(called(call) in _FROM_DISK for call in nodes(ast.Call, statement))


def _bound_at(files: Iterable[Source], name: str) -> _Place | None:
    """The latest statement at the top of a cell that gives a variable its value."""
    places = (_Place(cell, statement) for cell in files for statement in reversed(cell.tree.body))
    simple = (place for place in places if isinstance(place.statement, ast.Assign))
    return next((place for place in simple if name in bound_names(place.statement)), None)


def unread_evaluation_data(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A result that is named after an evaluation and computed of the training data, where nothing reads the data for evaluation."""
    if not facts.course.steps_count:
        return
    files, ran = sources_of(facts), _files(facts)
    scopes = [[(cell, node) for cell in files for node in own_nodes(cell.tree)]]
    scopes += [[(cell, node) for node in own_nodes(function)] for cell in files for function in nodes(FUNCTIONS, cell.tree)]
    read_in_cells = {node.id for cell in files for node in nodes(ast.Name, cell.tree) if isinstance(node.ctx, ast.Load)}
    for scope in scopes:
        names = [(node.id, node.ctx) for _, node in scope if isinstance(node, ast.Name)]
        bound = {name for name, context in names if isinstance(context, ast.Store)}
        unread = {name for name in bound - read_in_cells if FOR_EVALUATION.search(name) and "train" not in name}
        here = ((cell, node) for cell, node in scope if unread and cell.where.file in ran)
        for cell, statement in ((cell, node) for cell, node in here if isinstance(node, ast.Assign)):
            targets = [target.id for target in targets_of(statement) if isinstance(target, ast.Name)]
            if len(targets) != 1 or "train" in targets[0] or not _EVALUATES.search(targets[0]):
                continue
            read = {node.id for node in nodes(ast.Name, statement.value)}
            twins = {name: twin for twin in sorted(unread) if (name := _training_twin(twin, bound & read))}
            if any(_given(call) & twins.keys() for call in nodes(ast.Call, statement.value)):
                yield _evaluated_on(cell, statement, twins)
                return


def _given(call: ast.Call) -> set[str]:
    """The variables that are arguments of a call."""
    given = [*call.args, *(option.value for option in call.keywords)]
    return {node.id for node in given if isinstance(node, ast.Name)}


def _training_twin(name: str, others: set[str]) -> str | None:
    """The variable of the training data that is named like one of the data for evaluation."""
    pattern = re.sub(r"(?<![a-zA-Z])(test|validation|valid|val|eval|dev)(?![a-z])", "train(?:ing)?", re.escape(name), count=1)
    return next((other for other in sorted(others) if other != name and re.fullmatch(pattern, other)), None)


def _evaluated_on(cell: Source, statement: ast.Assign, twins: dict[str, str]) -> AutogradFinding:
    where = location(cell.where.file, statement.lineno, "<module>")
    value = exchanged(
        copied(statement.value), lambda node: ast.Name(twins[node.id]) if isinstance(node, ast.Name) and node.id in twins else None
    )
    name, twin = next(iter(twins.items()))
    target = ast.unparse(statement.targets[0])
    return finding(
        "evaluated_on_training",
        f"`{target}` is computed from `{name}`: nothing reads `{twin}`",
        where,
        edits=exchanging(where, statement.value, value),
        tensor=name,
        explanation="what is measured on samples that the model was trained on says nothing of new ones",
        is_hint=True,
    )
