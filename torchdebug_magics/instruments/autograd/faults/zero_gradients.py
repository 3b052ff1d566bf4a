"""Parameters whose gradients are 0, as an op on the way to the loss gives the same for whatever they are."""

from __future__ import annotations

import ast
import math
from collections.abc import Container, Iterator

import torch

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding, statement_at
from torchdebug_magics.instruments.autograd.tape import Backward, RecordedOp, walk
from torchdebug_magics.probing.source.edited_source import exchanging
from torchdebug_magics.probing.source.syntax import called, expression, nodes
from torchdebug_magics.probing.steps import parameters_of
from torchdebug_magics.report import Edit

_NORMS = frozenset({"native_layer_norm", "native_group_norm"})
"""Ops that return the means by which they normalize, too."""
_FEWEST_STEPS = 3
_PRODUCTS = frozenset({"mm", "bmm", "baddbmm", "matmul"})
_WITH_DERIVATIVE = {
    "softmax": "apply it along the dimension of the scores: along one of size 1 it gives 1 for any score",
    "log_softmax": "give the loss the score of a single output as it is, or its sigmoid: along a dimension of size 1, it gives 0",
    "relu": "use `nn.LeakyReLU(0.01)` in its place, or initialize what comes before: all that it is given is below 0",
    "layer_norm": "give it more than 1 feature, as by a linear layer before it: of 1, it gives its own bias for any input",
}
"""The change, by the op whose derivative is 0."""


def stopped_gradients(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Parameters whose gradient is 0 in each of several updates, as an op on the way to the loss has a derivative of 0."""
    derivatives = [op for op in facts.tape.ops if op.derivative_of >= 0]
    stopping = {op.derivative_of for op in derivatives if op.is_zero} - {op.derivative_of for op in derivatives if not op.is_zero}
    constant = {op.index for op in facts.tape.ops if _normalizes_single(op)}
    models = {id(root) for root in facts.roots if next(root.parameters(), None) is not None}
    groups: dict[int, list[torch.Tensor]] = {}
    for optimizer in facts.optimizers if stopping or constant else ():
        steps = facts.steps_of(optimizer)
        if len(steps) < _FEWEST_STEPS or not (any(step.nonzero for step in steps) or constant):
            continue  # what begins with zeros, as the second factor of LoRA, stops gradients for a step or two
        moved = frozenset[int]().union(*(step.nonzero | step.without for step in steps))
        without = frozenset[int]().union(*(step.without for step in steps))
        for tensor in (each for each in parameters_of(optimizer) if each.requires_grad and id(each) not in without):
            if stops := _up_to_loss(facts, tensor, constant) or (set() if id(tensor) in moved else stopping & _after(facts, tensor).keys()):
                groups.setdefault(max(stops), []).append(tensor)
    for index, tensors in groups.items():
        op = next(op for op in facts.tape.ops if op.index == index)
        names, name = facts.names_of(tensors), op.name.strip("_").removeprefix("native_")
        why = (
            "each number is normalized by itself"
            if index in constant and "softmax" not in name
            else f"the derivative of `{name}` is 0 here"
        )
        subject = f"`{names[0]}` gets" if len(names) == 1 else f"{plural(len(tensors), 'parameter')} get"
        yield finding(
            "no_gradient",
            f"{subject} gradients of 0: {why}",
            op.where,
            _WITH_DERIVATIVE.get(name, f"rescale or initialize what `{name}` is given: here its result changes with no element of it"),
            edits=_of_a_column(facts, op) if "softmax" in name else (),
            op=name,
            module=op.module,
            tensor=names[0] if names else None,
            parameters=names,
            is_hint=name == "mul" or op.root not in models,  # a weight of 0, or a penalty that has reached 0, may be meant
        )


def _after(facts: TrainingFacts, tensor: torch.Tensor, ends: Container[int] = frozenset()) -> dict[int, RecordedOp]:
    """What is computed from a tensor, by index, up to the ops in which it ends."""
    following = walk(facts.readers_of(tensor), lambda op: () if op.index in ends else facts.consumers.get(op.index, ()))
    return {op.index: op for op in following}


def _up_to_loss(facts: TrainingFacts, tensor: torch.Tensor, constant: set[int]) -> set[int]:
    """The ops that give the same for any input, where the loss depends on the tensor through these alone."""
    reached = _after(facts, tensor, constant) if constant else {}
    graphs = [event.ops for event in facts.course.events if isinstance(event, Backward)]
    losses = {index for ops in graphs for index in ops if not any(op.index in ops for op in facts.consumers.get(index, ()))}
    own = {op.index for op in facts.readers_of(tensor)}  # a norm's own bias does change its result
    return set() if losses & reached.keys() or own & constant else constant & _after(facts, tensor).keys()


def _normalizes_single(op: RecordedOp) -> bool:
    """Whether it gives the same for any input: a softmax of a single column, a norm of one number at a time."""
    if op.name in {"_softmax", "_log_softmax"}:
        return op.number is not None and len(op.reads[0].shape) > 1 and op.reads[0].shape[int(op.number)] == 1
    return op.name in _NORMS and len(op.makes) > 1 and math.prod(op.makes[0].shape) == math.prod(op.makes[1].shape) > 1


def _of_a_column(facts: TrainingFacts, op: RecordedOp) -> tuple[Edit, ...]:
    """A softmax of a single column: along the rows if it weighs something by products, as attention does; else a sigmoid was meant.

    The binary loss of logits takes neither.
    """
    sizes, written = (
        op.reads[0].shape,
        [node for node in nodes(ast.Call, statement_at(op.where)) if called(node) == op.name.removeprefix("_")],
    )
    if len(written) != 1:
        return ()
    call = written[0]
    if any(name.startswith("nll_loss") for name in (each.name for each in facts.computed_from(facts.consumers.get(op.index, ())).values())):
        scores = call.args[0] if call.args else call.func.value if isinstance(call.func, ast.Attribute) else None
        return exchanging(op.where, call, scores) if sizes[-1] > 1 else ()  # the loss applies its own, along the classes
    if len(sizes) != 2 or sizes[1] != 1:  # noqa: PLR2004 - rows and columns
        return ()
    given = [option for option in call.keywords if option.arg != "dim"]
    args = call.args if len(given) < len(call.keywords) else call.args[:-1]
    later = {each.name for each in facts.computed_from(facts.consumers.get(op.index, ())).values()}
    is_gate = "mul" in later and not later & _PRODUCTS  # or weights of the rows
    if is_gate or (op.name == "_log_softmax" and not any(name.startswith("binary_cross_entropy") for name in later)):
        return ()
    if later & _PRODUCTS:
        return exchanging(op.where, call, ast.Call(call.func, args, [*given, ast.keyword("dim", ast.Constant(0))]))
    of_tensor = isinstance(call.func, ast.Attribute) and not args
    whole = call.func.value if of_tensor and isinstance(call.func, ast.Attribute) else args[0]
    takes_logits = "binary_cross_entropy_with_logits" in later
    return exchanging(op.where, call, whole if takes_logits else expression(f"torch.sigmoid({ast.unparse(whole)})"))
