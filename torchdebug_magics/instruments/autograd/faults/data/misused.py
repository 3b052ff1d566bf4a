"""What the code does with data against the rules of what it calls: statistics of new data, turned masks, used-up iterators, own weights."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeGuard

import torch

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.autograd.faults.data.unread import sources_of
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import edited, finding, statement_at
from torchdebug_magics.instruments.autograd.tape import RecordedOp
from torchdebug_magics.probing.modules import live_modules
from torchdebug_magics.probing.names import user_names
from torchdebug_magics.probing.source.edited_source import Source, exchanging, running_cell
from torchdebug_magics.probing.source.syntax import (
    FUNCTIONS,
    as_atom,
    blocks,
    bound_names,
    called,
    expression,
    last_name,
    method,
    names_in,
    nodes,
    targets_of,
)
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.report import Edit

_ITERATORS = frozenset({"zip", "map", "filter", "enumerate", "iter", "reversed"})
_PADDING = re.compile(r"\w*pad(_?(id|idx|index|token|tok)\w*)?", re.IGNORECASE)
_TRAINING = re.compile(r"(?:^|[^a-z])train|fit(?!_transform)", re.IGNORECASE)


def misuses(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """All of them, in the cells and files that ran."""
    cells = sources_of(facts)
    values = dict(user_names(sys._getframe()))
    yield from _compared_values(facts)
    yield from _used_up(cells)
    yield from _overwritten_sums(cells)
    yield from _never_reset(cells)
    yield from _turned_masks(cells)
    yield from _fitted_anew(cells, values)
    yield from _loaded_itself(cells, values)


def _compared_values(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """The largest scores, in the place of their indices, compared with classes: they are never equal."""
    for op in facts.tape.ops:
        scores = [use for use in op.reads if use.can_have_grad] if op.name == "eq" and len(op.reads) > 1 else []
        maker = facts.tape.maker(scores[0]) if len(scores) == 1 else None
        if maker is None or maker.name != "max" or len(maker.makes) < 2 or maker.makes[0].memory != scores[0].memory:  # noqa: PLR2004
            continue
        statement = statement_at(maker.where)
        for node in nodes(ast.Subscript, statement):
            if called(node.value) == "max" and ast.unparse(node.slice) == "0":
                edits = exchanging(maker.where, node, ast.Subscript(node.value, ast.Constant(1), ast.Load()))
                yield _values_finding(maker, edits)
                return
        for attribute in nodes(ast.Attribute, statement):
            if called(attribute.value) == "max" and attribute.attr == "values":
                edits = exchanging(maker.where, attribute, ast.Attribute(attribute.value, "indices", ast.Load()))
                yield _values_finding(maker, edits)
                return
        match statement:
            case ast.Assign([ast.Tuple([ast.Name(first), ast.Name(second)])], value):
                edits = edited(maker.where, f"{second}, {first} = {ast.unparse(value)}")
                yield _values_finding(maker, edits)
                return


def _values_finding(maker: RecordedOp, edits: tuple[Edit, ...]) -> AutogradFinding:
    return finding(
        "compared_scores",
        "the largest scores are compared with classes, and not their indices",
        maker.where,
        "compare the indices, the second result of `max`",
        edits=edits,
        op="max",
        explanation="`torch.max(scores, dim)` returns values and indices: a class is an index",
    )


def _used_up(cells: list[Source]) -> Iterator[AutogradFinding]:
    """An iterator that is made before a loop, and gone through in each of its rounds: the first leaves nothing of it."""
    for cell in cells:
        for outer in nodes((ast.For, ast.While), cell.tree):
            for inner in nodes(ast.For, *outer.body):
                name = inner.iter.id if isinstance(inner.iter, ast.Name) else ""
                ends_early = any(True for _ in nodes(ast.Break, inner))
                if not name or ends_early or name in bound_names(*outer.body):
                    continue
                made = [node for node in nodes(ast.Assign, cell.tree) if name in map(last_name, targets_of(node))]
                value = made[-1].value if len(made) == 1 and made[0].lineno < outer.lineno else None
                is_iterator = isinstance(value, ast.GeneratorExp) or (isinstance(value, ast.Call) and ast.unparse(value.func) in _ITERATORS)
                if is_iterator:
                    edits = cell.merged((cell.replacing(made[0], ""), cell.before(inner, cell.text(made[0]))))
                    yield finding(
                        "used_up",
                        f"`{name}` is used up after the first round of the loop: the others run over nothing",
                        location(cell.where.file, inner.lineno, "<module>"),
                        edits=edits,
                        fix=f"run `{cell.text(made[0])}` inside the outer loop",
                        explanation="an iterator gives each of its items once",
                    )
                    return


def _overwritten_sums(cells: list[Source]) -> Iterator[AutogradFinding]:
    """A loss that begins with 0, and that each round of a loop gives another value: the last one alone is differentiated."""
    for cell in cells:
        for block in (block for node in ast.walk(cell.tree) for block in blocks(node)):
            for begin, loop in pairwise(block):
                value = begin.value if isinstance(begin, ast.Assign) else None
                name = (
                    last_name(begin.targets[0])
                    if isinstance(begin, ast.Assign) and isinstance(value, ast.Constant) and value.value == 0
                    else ""
                )
                later = block[block.index(loop) + 1 :]
                is_differentiated = any(ast.unparse(call.func) == f"{name}.backward" for call in nodes(ast.Call, *later))
                sums = [node for node in nodes((ast.Assign, ast.AugAssign), loop) if name in map(last_name, targets_of(node))]
                if not name or not isinstance(loop, ast.For) or not is_differentiated or len(sums) != 1 or sums[0] not in loop.body:
                    continue
                if isinstance(sums[0], ast.Assign) and name not in names_in(sums[0].value):
                    text = f"{name} = {name} + {as_atom(sums[0].value)}"
                    yield finding(
                        "dropped_result",
                        f"`{name}` is overwritten in each round: the last one alone counts",
                        location(cell.where.file, sums[0].lineno, "<module>"),
                        edits=(cell.replacing(sums[0], text),),
                        tensor=name,
                        explanation=f"`{cell.text(begin)}` before the loop begins a sum, which nothing adds up",
                    )
                    return


def _never_reset(cells: list[Source]) -> Iterator[AutogradFinding]:
    """Sums of an epoch that begin with 0 before the first one alone: each result is of all epochs, divided by the batches of one."""
    for cell in cells:
        for block in (block for node in ast.walk(cell.tree) for block in blocks(node)):
            for epochs in (node for node in block if isinstance(node, ast.For)):
                begun = {last_name(node.targets[0]): node for node in block[: block.index(epochs)] if _is_zero(node)}
                batches = [node for node in epochs.body if isinstance(node, ast.For)]
                added = {last_name(node.target) for node in nodes(ast.AugAssign, *batches) if isinstance(node.op, ast.Add)}
                sums = {name: node for name, node in begun.items() if name in added and name not in bound_names(*_simple(epochs.body))}
                after = epochs.body[epochs.body.index(batches[-1]) + 1 :] if batches else []
                divided = [node for node in nodes(ast.BinOp, *after) if isinstance(node.op, ast.Div) and last_name(node.left) in sums]
                if not any(called(node.right) == "len" for node in divided):
                    continue
                lines = [cell.text(node) for node in sums.values()]
                names = listed([f"`{name}`" for name in sums])
                yield finding(
                    "miscounted",
                    f"{names} {'is' if len(sums) == 1 else 'are'} not set to 0 at the start of each epoch",
                    location(cell.where.file, divided[0].lineno, "<module>"),
                    fix=f"run {listed([f'`{line}`' for line in lines])} at the start of each epoch",
                    edits=(cell.before(epochs.body[0], "\n".join(lines)),),
                    tensor=next(iter(sums)),
                    explanation="what is divided by the length of one epoch is the sum over all epochs so far",
                )
                return


def _is_zero(node: ast.stmt) -> TypeGuard[ast.Assign]:
    """``total = 0`` or ``total = 0.0``."""
    value = node.value if isinstance(node, ast.Assign) else None
    return isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(value, ast.Constant) and value.value == 0


def _simple(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The assignments among them, in which a sum begins anew."""
    return [node for node in statements if isinstance(node, ast.Assign)]


def _turned_masks(cells: list[Source]) -> Iterator[AutogradFinding]:
    """A mask of padding that is True where there are tokens, given to a layer of torch's that leaves out what is True."""
    torchs = {name for module in live_modules() for name, part in module.named_children() if type(part).__module__.startswith("torch.nn.")}
    for cell in cells:
        for function in nodes(FUNCTIONS, cell.tree):
            for call in nodes(ast.Call, function):
                masks = [option.value for option in call.keywords if (option.arg or "").endswith("key_padding_mask")]
                if not masks or last_name(call.func) not in torchs:
                    continue
                chain = list(_made_of(masks[0], function))
                is_turned = any(isinstance(node, ast.UnaryOp) or called(node) == "logical_not" for part in chain for node in ast.walk(part))
                tests = [node for part in chain for node in nodes(ast.Compare, part) if _keeps_tokens(node)]
                if is_turned or len(tests) != 1:
                    continue
                where = location(cell.where.file, tests[0].lineno, function.name)
                new = ast.Compare(tests[0].left, [ast.Eq()], tests[0].comparators)
                yield finding(
                    "turned_mask",
                    f"`{ast.unparse(tests[0])}` hides the tokens, and shows the padding",
                    where,
                    edits=exchanging(where, tests[0], new),
                    explanation="`key_padding_mask` is True where a position is to be left out",
                )
                return


def _made_of(value: ast.expr, function: ast.AST) -> Iterator[ast.expr]:
    """An expression, and what the names in it were given in the function, the latest first."""
    yield value
    seen, todo = set[str](), names_in(value)
    while new := todo - seen:
        seen |= new
        made = [node.value for node in nodes(ast.Assign, function) if new & {*map(last_name, targets_of(node))}]
        yield from made
        todo = {name for part in made for name in names_in(part)}


def _keeps_tokens(test: ast.Compare) -> bool:
    """``tokens != 0``, or another number of the padding."""
    number = test.comparators[0]
    is_padding = (isinstance(number, ast.Constant) and number.value == 0) or bool(_PADDING.fullmatch(last_name(number)))
    return is_padding and isinstance(test.ops[0], (ast.NotEq, ast.Gt))


def _fitted_anew(cells: list[Source], values: Mapping[str, object]) -> Iterator[AutogradFinding]:
    """A scaler that is fitted to the data for training, and once more to others, in whose statistics these get lost."""
    fits: dict[str, list[tuple[Source, ast.stmt, ast.Call]]] = {}
    for cell in sorted(cells, key=lambda cell: cell.where.cell or 0):
        for statement in sorted(nodes(ast.Assign, cell.tree), key=lambda node: node.lineno):
            for call in (call for call in nodes(ast.Call, statement) if method(call) == "fit_transform"):
                fits.setdefault(ast.unparse(call.func).removesuffix(".fit_transform"), []).append((cell, statement, call))
    for name, places in fits.items():
        first, *others = places
        made_anew = sum(name in map(last_name, targets_of(node)) for cell in cells for node in nodes(ast.Assign, cell.tree))
        others = [place for place in others if not _TRAINING.search(ast.unparse(place[1]).replace("fit_transform", ""))]
        if (
            not others
            or made_anew > 1
            or not hasattr(values.get(name), "fit_transform")
            or ast.unparse(first[2]) == ast.unparse(others[0][2])
        ):
            continue
        cell, _, call = others[0]
        where = location(cell.where.file, call.lineno, "<module>")
        new = ast.Call(expression(f"{name}.transform"), call.args, call.keywords)
        yield finding(
            "refitted",
            f"`{name}` is fitted anew to `{ast.unparse(call.args[0]) if call.args else 'other data'}`",
            where,
            edits=exchanging(where, call, new),
            explanation="new data are scaled with the statistics of the data for training: their own hide how they differ from those",
            is_hint=True,
        )
        return


def _loaded_itself(cells: list[Source], values: Mapping[str, object]) -> Iterator[AutogradFinding]:
    """A state that a model is to go back to, and whose tensors are its own: they have changed with the training."""
    for cell, _ in running_cell():
        for call in nodes(ast.Call, cell.tree):
            owner = call.func.value if method(call) == "load_state_dict" and isinstance(call.func, ast.Attribute) and call.args else None
            model, state = (values.get(ast.unparse(owner)), values.get(ast.unparse(call.args[0]))) if owner is not None else (None, None)
            if not isinstance(model, torch.nn.Module) or not isinstance(state, Mapping) or not state:
                continue
            own = model.state_dict()
            if not all(
                key in own and isinstance(value, torch.Tensor) and own[key].data_ptr() == value.data_ptr() for key, value in state.items()
            ):
                continue
            name = ast.unparse(call.args[0])
            made = [(place, node) for place in cells for node in nodes(ast.Assign, place.tree) if name in map(last_name, targets_of(node))]
            taken = [(place, node) for place, node in made if method(node.value) == "state_dict"]
            where = (
                location(cell.where.file, call.lineno, "<module>")
                if not taken
                else location(taken[0][0].where.file, taken[0][1].lineno, "")
            )
            yield finding(
                "shared_memory",
                f"`{name}` holds the model's own tensors: loading it changes nothing",
                where,
                fix="keep a copy: `copy.deepcopy(model.state_dict())`",
                edits=exchanging(where, taken[0][1].value, _cloned(taken[0][1].value)) if len(taken) == 1 else (),
                tensor=name,
                explanation="`state_dict()` returns the tensors themselves, which later updates change",
            )
            return


def _cloned(state: ast.expr) -> ast.expr:
    return expression(f"{{key: value.clone() for key, value in {ast.unparse(state)}.items()}}")
