"""What runs in the wrong mode, or on numbers of another scale; parts that are meant to be frozen, and change."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import islice

import torch

from torchdebug_magics.format import listed, number, plural
from torchdebug_magics.instruments.autograd.faults.data.seen_samples import FOR_EVALUATION
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.graph_recorder import RootCall
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import code_at, edited, finding, loop_around, statement_at
from torchdebug_magics.instruments.autograd.tape import Backward, OptimizerStep, RecordedOp, Tape, walk
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.source import edited_source
from torchdebug_magics.probing.source.edited_source import Source, exchanging
from torchdebug_magics.probing.source.syntax import (
    blocks,
    called,
    enclosing,
    expression,
    last_name,
    loops_around,
    method,
    nodes,
    tree_of,
)
from torchdebug_magics.report import Edit, Location

_DROPS = frozenset({"native_dropout", "bernoulli_"})
_DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})
_SAMPLER = re.compile(r"MC|Monte|Bayes", re.IGNORECASE)
"""In the name of a class that draws predictions on purpose."""
_FEWEST_INPUTS = 3
"""Of a model that is called in a loop, and has hardly more than two in one call."""
_SCALE = 20.0
"""Ratio of the largest numbers of two inputs from which on one of them is taken for unscaled."""


def evaluated_in_training_mode(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A model that is trained, or a cell that only evaluates, called without gradients and with BatchNorm or Dropout in training mode."""
    trains_nothing, has_batches = not facts.course.events, facts.watched.loaders.batches_count > 1
    calls = facts.watched.recorder.root_calls
    for (root, with_gradients, training), seen in calls.items():
        model = seen.root() if training and seen.modes else None
        if model is None:
            continue
        is_loop = has_batches or len(facts.inputs_of(model)) >= _FEWEST_INPUTS
        is_only = trains_nothing and is_loop and not any((root, each, False) in calls for each in (True, False))
        is_suspect = is_only and facts.is_predicted_with(root) if with_gradients else is_only or seen.parameters & facts.updated
        if is_suspect and (with_gradients or not _feeds_a_loss(facts.tape, seen.op)):
            where = call_line(seen.op)
            value = getattr(statement_at(where), "value", None)  # a model that is an item of a dict has no name of its own
            name = ast.unparse(value.func) if isinstance(value, ast.Call) and isinstance(value.func, ast.Subscript) else seen.name
            without = _without_switch(where, f"{name}.train()")
            yield finding(
                "eval_in_train_mode",
                f"`{name}` is evaluated in training mode",
                where,
                f"call `{name}.eval()` before `{where.source if where is not None else 'the call'}`",
                fix=f"remove `{name}.train()` from the loop of the evaluation" if without else "",
                edits=without,
                explanation="Dropout is on, and BatchNorm uses the batch's statistics and updates its running ones: " + listed(seen.modes),
                is_hint=True,
            )


def _without_switch(where: Location | None, code: str) -> tuple[Edit, ...]:
    """The edit that leaves a statement out of the loop around an evaluation, in which nothing is trained."""
    tree = None if where is None else tree_of(where.file)
    if where is None or tree is None:
        return ()
    for loop in loops_around(tree, where.line):
        before = [node for node in loop.body if ast.unparse(node) == code and node.lineno < where.line]
        if before and not any(called(call) == "backward" for call in nodes(ast.Call, loop)):
            return (Source(where, tree).replacing(before[0], ""),)
    return ()


def dropped_in_evaluation(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Dropout that evaluation mode does not switch off, as that of a function which is not told of the mode."""
    drops = [op for op in facts.tape.ops if op.name in _DROPS and not op.training and op.root and not op.in_backward]
    for op in {op.line: op for op in drops}.values():
        if op.line is None:
            continue
        scopes = [node for node in enclosing(tree_of(op.line.file), op.line.line) if isinstance(node, ast.FunctionDef)]
        classes = [node.name for node in enclosing(tree_of(op.line.file), op.line.line) if isinstance(node, ast.ClassDef)]
        is_sampler = any(_SAMPLER.search(name) for name in classes)
        is_method = bool(scopes) and not is_sampler and [argument.arg for argument in scopes[-1].args.args[:1]] == ["self"]
        for call in nodes(ast.Call, statement_at(op.where)):
            if is_method and (switched := _switched(call)) is not None:
                yield finding(
                    "eval_in_train_mode",
                    f"`{called(call) or called(call.func)}` drops values in evaluation mode, too",
                    op.where,
                    edits=exchanging(op.where, call, switched),
                    fix=f"`{ast.unparse(switched)}`",
                    op=op,
                    explanation="`eval()` switches the modules of a model, and no function that is called without `self.training`",
                    is_hint=True,
                )
                return


def _switched(call: ast.Call) -> ast.Call | None:
    """A call of dropout that asks `self.training`; None for one that does so, or that is given the mode."""
    name, options = called(call), {option.arg: option.value for option in call.keywords}
    of_mode = ast.Attribute(ast.Name("self", ast.Load()), "training", ast.Load())
    if name in _DROPOUTS and len(call.args) <= 2 and "training" not in options:  # noqa: PLR2004 - the input and the probability
        return ast.Call(call.func, call.args, [*call.keywords, ast.keyword("training", of_mode)])
    share = options.get("dropout_p")
    if share is not None and not isinstance(share, ast.IfExp) and "training" not in ast.unparse(share):
        given = ast.IfExp(of_mode, share, ast.Constant(0.0))
        others = [option if option.arg != "dropout_p" else ast.keyword("dropout_p", given) for option in call.keywords]
        return ast.Call(call.func, call.args, others)
    made = call.func.func if isinstance(call.func, ast.Call) else None
    if isinstance(call.func, ast.Call) and isinstance(made, ast.Attribute) and made.attr.lower() in _DROPOUTS:  # made in the forward
        shares = [*call.func.args, *(option.value for option in call.func.keywords if option.arg == "p")] or [ast.Constant(0.5)]
        return ast.Call(
            expression(f"{ast.unparse(made.value)}.functional.{made.attr.lower()}"),
            [*call.args, shares[0]],
            [ast.keyword("training", of_mode)],
        )
    return None


def trained_in_eval_mode(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A model whose last backward pass before an update came from a forward in evaluation mode."""
    ops = {op.index: op for op in facts.tape.ops}
    calls = [(root, seen) for (root, _, training), seen in facts.watched.recorder.root_calls.items() if not training and seen.modes]
    for place, step in enumerate(facts.course.events):
        if not isinstance(step, OptimizerStep) or not step.nonzero:
            continue
        passed = [event for event in facts.course.events[:place] if isinstance(event, Backward) and event.leaves & step.parameters]
        for root, seen in calls if passed else ():
            of_root = [ops[index] for index in sorted(passed[-1].ops) if index in ops and ops[index].root == root]
            if seen.parameters & step.parameters and of_root and not any(op.training for op in of_root):
                yield _updated_in_evaluation(seen.name, step, passed[-1]) or _trained_in_evaluation(
                    facts, root, seen, call_line(of_root[0])
                )
                return


def _trained_in_evaluation(facts: TrainingFacts, root: int, seen: RootCall, where: Location | None) -> AutogradFinding:
    """Of a model that was in training mode before, nothing has switched it back; of any other it may be meant."""
    had_been = any(key == root and training for key, _, training in facts.watched.recorder.root_calls)
    loop = loop_around(where)
    return finding(
        "train_in_eval_mode",
        f"`{seen.name}` is trained in evaluation mode",
        where,
        f"call `{seen.name}.train()` before the loop",
        edits=edited(where, f"{seen.name}.train()", "before", loop) if had_been and loop is not None else (),
        explanation="Dropout is off and BatchNorm uses its running statistics: " + listed(seen.modes),
        is_hint=True,
    )


def _updated_in_evaluation(model: str, step: OptimizerStep, backward: Backward) -> AutogradFinding | None:
    """An update in a loop that goes through data of which the user's name for it says that they are for evaluation."""
    loop = loop_around(step.where)
    data = ast.unparse(loop.iter) if isinstance(loop, ast.For) else ""
    if not FOR_EVALUATION.search(data):
        return None
    known = [(event.where, statement) for event in (backward, step) if (statement := statement_at(event.where)) is not None]
    sources = [(Source(where, tree), statement) for where, statement in known if where is not None and (tree := tree_of(where.file))]
    removed = [source.replacing(statement, "") for source, statement in sources if source.is_alone(statement)]
    around = [block for source, _ in sources[:1] for node in ast.walk(source.tree) for block in blocks(node)]
    is_whole = any(len(block) <= len(removed) for block in around for _, statement in sources if statement in block)
    codes = dict.fromkeys([code_at(backward.where, "backward"), code_at(step.where, "step")])
    return finding(
        "train_in_eval_mode",
        f"`{model}` is updated in the loop over `{data}`",
        step.where,
        fix="remove " + " and ".join(f"`{code}`" for code in codes),
        edits=tuple(removed) if len(removed) == len(sources) and not is_whole else (),
        explanation="`eval()` switches Dropout and BatchNorm, and keeps no optimizer from changing the weights",
        is_hint=True,
    )


def evaluated_on_bytes(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A model that is trained on scaled numbers, and called without gradients on bytes, or the reverse."""
    calls = facts.watched.recorder.root_calls
    trained = {root: seen for (root, with_gradients, _), seen in calls.items() if with_gradients and seen.parameters & facts.updated}
    for (root, with_gradients, _), seen in calls.items():
        usual = trained.get(root) if not with_gradients else None
        if usual is None or seen.numbers is None or usual.numbers is None:
            continue
        if seen.numbers.are_bytes == usual.numbers.are_bytes:
            continue
        words = ("evaluated", "trained") if seen.numbers.are_bytes else ("trained", "evaluated")
        scaled, largest = sorted((seen.numbers.largest, usual.numbers.largest))
        if 0 < _SCALE * scaled < largest:
            yield finding(
                "evaluated_on_bytes",
                f"`{seen.name}` is {words[0]} on numbers up to {number(largest)}, and {words[1]} on numbers up to {number(scaled)}",
                call_line(seen.op),
                "prepare the data for both in the same way: one of them is scaled, as `ToTensor` or `/ 255` does, and one is not",
                edits=_scaled_at(call_line(seen.op), seen.name) if seen.numbers.are_bytes and usual.numbers.largest <= 1 else (),
                saved_at=call_line(usual.op),
                explanation="whole numbers up to 255 are pictures as they are stored",
            )
            return


def _scaled_at(where: Location | None, model: str) -> tuple[Edit, ...]:
    """The call of a model on bytes, on numbers from 0 to 1."""
    called_here = [call for call in nodes(ast.Call, statement_at(where)) if ast.unparse(call.func) == model and len(call.args) == 1]
    if len(called_here) != 1:
        return ()
    scaled = ast.BinOp(called_here[0].args[0], ast.Div(), ast.Constant(255))
    return exchanging(where, called_here[0], ast.Call(called_here[0].func, [scaled], called_here[0].keywords))


def _feeds_a_loss(tape: Tape, first: RecordedOp) -> bool:
    """Whether an op with a graph uses the result, as with the samples of a GAN's generator."""
    consumers = tape.consumers()
    later = islice(walk([first], lambda op: consumers.get(op.index, ())), 1, None)
    return any(op.grad_enabled and any(use.requires_grad for use in op.reads) for op in later)


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
    return finding(
        "frozen_statistics",
        f"`{listed(sorted(around))}` is frozen, but its {kind.__name__} statistics are updated",
        where,
        fix=f"call `{code}` after `{where.source}`" if trains is not None and where is not None else f"call `{code}` before the loop",
        edits=edited(where, code, "after") if trains is not None else (),
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
            for where, statement in facts.statements():
                match statement:
                    case ast.Assign([ast.Attribute(holder, "requires_grad")], ast.Constant(False)) if last_name(holder) == path.rpartition(
                        "."
                    )[2] or variable_of(module) == ast.unparse(holder):
                        yield finding(
                            "frozen_in_vain",
                            f"`{path or ast.unparse(holder)}` is not frozen, and is updated: a module has no `requires_grad` of its own",
                            where,
                            edits=edited(where, f"{ast.unparse(holder)}.requires_grad_(False)", statement=statement),
                            module=path,
                            explanation="Python gives the module a new attribute of that name; the parameters keep theirs",
                        )
                        return


def moved_though_frozen(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Parameters without `requires_grad` that still have a gradient: an optimizer goes on moving them, by momentum or weight decay."""
    moved = facts.watched.moved & facts.reached  # not by a gradient that the user's code gives
    if not moved:
        return
    names = facts.names_of(parameter for parameter in facts.parameters.values() if id(parameter) in moved)
    for where, statement in facts.statements():
        match statement:
            case ast.Assign([ast.Attribute(holder, "requires_grad")], value) if ast.unparse(value) != "True":
                new = f"{ast.unparse(holder)}.grad = None"
            case ast.Expr(ast.Call(ast.Attribute(holder, "requires_grad_"), [ast.Constant(False)])):
                loops = [loop.iter for loop in loops_around(tree_of(where.file), where.line) if isinstance(loop, ast.For)]
                is_one = any("parameters" in called(part) for loop in loops for part in nodes(ast.Call, loop))
                new = f"{ast.unparse(holder)}.grad = None" if is_one else f"{ast.unparse(holder)}.zero_grad()"
            case _:
                continue
        yield finding(
            "frozen_in_vain",
            f"the optimizer goes on updating {plural(len(moved), 'frozen parameter')}: a gradient is still there",
            where,
            fix=f"run `{new}` after it",
            edits=edited(where, new, "after"),
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
