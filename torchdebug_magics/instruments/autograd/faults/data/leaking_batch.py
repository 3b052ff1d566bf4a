"""``leaking_batch``: the output of one sample depends on another sample of the batch, or on its own place in it."""

from __future__ import annotations

import ast
import inspect
import math
from dataclasses import replace
from typing import NamedTuple

import torch

from torchdebug_magics.instruments.autograd.faults.data.known_answers import known_answer
from torchdebug_magics.instruments.autograd.graph_recorder import GraphRecorder
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.sample_twins import SampleTwins
from torchdebug_magics.instruments.autograd.source_readings import finding, statement_at, with_option
from torchdebug_magics.instruments.autograd.tape import RecordedOp, walk
from torchdebug_magics.instruments.autograd.token_twins import TokenTwins
from torchdebug_magics.probing.source.edited_source import exchanging, made_as
from torchdebug_magics.probing.source.syntax import (
    called,
    expression,
    nodes,
    parsed,
)
from torchdebug_magics.report import Edit, Location

_IMAGE_DIMENSIONS, _TABLE_DIMENSIONS = 4, 2


_LAYS_OUT = frozenset(
    {"view", "_unsafe_view", "expand", "clone", "transpose", "permute", "unsqueeze", "native_dropout", "unbind", "select"}
)
_REDUCTIONS = frozenset({"mean", "sum", "max", "min", "amax", "amin", "std", "var", "norm", "linalg_vector_norm"})
_PRODUCTS = frozenset({"mul", "mm", "bmm", "baddbmm", "addmm", "dot", "mv"})


class Mixing(NamedTuple):
    """An op whose output for one sample depends on another one."""

    op: RecordedOp
    samples_count: int
    kinds: tuple[str, ...] = ()
    """The names of the classes that have the option ``batch_first``, of the module in which it is and of those around that."""
    wants_batch_first: bool = True
    """Whether the samples are along the dimension that the option would make the first."""


def leak(recorder: GraphRecorder, loss: torch.Tensor) -> AutogradFinding | None:
    """What the twins know of the batch when the first backward pass begins, at that loss.

    Which dimension holds the samples is known from the loss, which has a row for each. Where it has one for each time step of each
    sample, only a model that keeps no dimension apart leaks: there is none by which it could be right.
    """
    if not recorder.twins or not recorder.twins[0].samples_count:
        return None
    (samples, steps, tokens), recorder.twins = recorder.twins, []
    passed = list(recorder.tape.ancestors(id(loss)))
    if isinstance(tokens, TokenTwins) and tokens.answer is not None and tokens.answer.loss in passed:
        return known_answer(tokens.answer, reversed(passed))
    rows, (first, second) = _shape_before_reduction(passed), (*samples.input_shape, 0)[:2]
    has_row_a_step = samples.has_steps and (rows[:1] == (first * second,) or rows[:2] == (first, second))
    along_samples, along_steps = (_first_mixing(recorder, twins, passed) for twins in (samples, steps))
    mixing = None
    if _is_leak(samples, along_samples, rows):
        mixing = along_samples
    elif (along_samples is not None) if has_row_a_step else (samples.has_steps and rows[:1] == (second,)):
        has_mixed = any(made.shape for op in steps.mixing() if op in passed for made in op.makes)
        is_normalised = along_steps is not None and _only_normalises(recorder, along_steps.op)
        apart_from_steps = (along_steps if is_normalised else along_samples) if has_row_a_step and has_mixed else None
        mixing = along_steps if _is_leak(steps, along_steps, rows) else apart_from_steps
    return None if mixing is None else _leak_finding(mixing)


def predicted_leak(recorder: GraphRecorder) -> AutogradFinding | None:
    """Of a cell without a backward pass: a softmax that a model returns, and that runs over the samples of a table."""
    samples = next(iter(recorder.twins), None)
    if samples is None or not samples.samples_count or samples.has_steps:
        return None
    consumers = recorder.tape.consumers()
    inside = [op for op in recorder.tape.ops if op.root and "softmax" in op.name and op.makes[0].shape[:1] == (samples.samples_count,)]
    returned = [op for op in inside if all(consumer.name == "detach" or not consumer.root for consumer in consumers.get(op.index, ()))]
    mixing = _first_mixing(recorder, samples, returned)
    shape = () if mixing is None else mixing.op.makes[0].shape
    return None if mixing is None or len(shape) != _TABLE_DIMENSIONS or shape[-1] == 1 else replace(_leak_finding(mixing), is_hint=True)


def _leak_finding(mixing: Mixing) -> AutogradFinding:
    """The op that mixes samples."""
    op = mixing.op
    attends = op.module_type == "MultiheadAttention"
    verb = "attends over the samples of the batch" if attends else "treats the samples of the batch as time steps"
    headline, fix = (
        f"`{op.module}` ({op.module_type}) {verb}",
        f"set `batch_first={mixing.wants_batch_first}` where `{op.module}` is created",
    )
    where, edits = _created(mixing, mixing.kinds, "batch_first", value=mixing.wants_batch_first or None)
    if "softmax" in op.name:
        where, edits = op.where, ()
        headline, fix = "`softmax` runs over the samples of the batch", _other_dimension(mixing)
        if op.module_type in {"Softmax", "LogSoftmax"} and len(op.reads[0].shape) == _TABLE_DIMENSIONS:
            where, edits = _created(mixing, (op.module_type,), "dim", value=-1)
    elif op.name in _REDUCTIONS:
        where, name = op.where, op.name.removeprefix("linalg_vector_")
        headline, fix, edits = f"`{name}` reduces the samples of the batch with their values", *_of_each_sample(mixing)
    return finding(
        "leaking_batch",
        headline,
        where,
        fix,
        edits=edits,
        saved_at=op.where if where is not op.where else None,
        op=op.name.strip("_"),
        module=op.module,
        explanation="the output for one sample depends on the other samples of its batch, also at inference",
        is_hint=op.name in _REDUCTIONS,
    )


def _of_each_sample(mixing: Mixing) -> tuple[str, tuple[Edit, ...]]:
    """The reduction along all dimensions but that of the samples."""
    op, many = mixing.op, len(mixing.op.reads[0].shape)
    dims = "1" if many == _TABLE_DIMENSIONS else f"({', '.join(map(str, range(1, many)))})"
    options = [ast.keyword("dim", expression(dims)), ast.keyword("keepdim", ast.Constant(value=True))]
    written = [
        call for call in nodes(ast.Call, statement_at(op.where)) if called(call).lstrip("a") == op.name.removeprefix("linalg_vector_")
    ]
    if len(written) != 1 or written[0].keywords or op.name in {"max", "min"}:
        return f"reduce along dim={dims} with keepdim=True", ()
    new = ast.Call(written[0].func, written[0].args, options)
    return f"`{ast.unparse(new)}`", exchanging(op.where, written[0], new)


def _created(mixing: Mixing, kinds: tuple[str, ...], option: str, *, value: bool | int | None) -> tuple[Location | None, tuple[Edit, ...]]:
    """The only line of the user's that makes such a module, by name if several do, with another value of an option; else that of the op."""
    file = mixing.op.line.file if mixing.op.line is not None else ""
    name = (mixing.op.module or "").rpartition(".")[2]
    made = [pair for kind in kinds for pair in made_as(file, name, kind)]
    if len(made) != 1:
        return mixing.op.where, ()
    where, call = made[0]
    return where, exchanging(where, call, with_option(call, option, value=value))


def _shape_before_reduction(passed: list[RecordedOp]) -> tuple[int, ...]:
    """Of the tensor that the loss reduces to a number."""
    for op in passed:
        shape = next((use.shape for use in op.reads if use.requires_grad and use.shape), ())
        if shape and op.makes and not any(made.shape for made in op.makes):
            return shape
    return ()


def _is_leak(twins: SampleTwins, mixing: Mixing | None, rows: tuple[int, ...]) -> bool:
    """Whether samples along the twins' dimension are mixed, and the loss has a row for each of them."""
    if mixing is None or rows[:1] != (twins.samples_count,):
        return False
    other = twins.input_shape[1 - twins.dimension] if len(twins.input_shape) > 1 else 0
    is_sequence = twins.dimension == 0 and len(twins.input_shape) not in {2, _IMAGE_DIMENSIONS}
    return len(rows) == 1 or not is_sequence or rows[1] != other


def _first_mixing(recorder: GraphRecorder, twins: SampleTwins, passed: list[RecordedOp]) -> Mixing | None:
    on_the_way = {op.index for op in passed}
    mixing = [op for op in twins.mixing() if op.index in on_the_way]
    mixed = {op.index for op in mixing}
    first = [op for op in mixing if not any(parent.index in mixed for parent in op.parents)]
    mistaken = (op for op in first if op.grad_enabled and _is_mistaken(recorder, op))
    op = next(mistaken, None)
    part = None if op is None else next(reversed(_parts_around(recorder, op)), None)
    wants = not (isinstance(part, torch.nn.RNNBase) and part.batch_first)
    return None if op is None else Mixing(op, twins.samples_count, _kinds_around(recorder, op), wants_batch_first=wants)


def _parts_around(recorder: GraphRecorder, op: RecordedOp) -> list[torch.nn.Module]:
    """The modules in which an op ran, the outermost first."""
    roots = (root for call in recorder.root_calls.values() if (root := call.root()) is not None and id(root) == op.root)
    return [part for root in roots for path, part in root.named_modules() if f"{op.module}.".startswith(f"{path}.")]


def _kinds_around(recorder: GraphRecorder, op: RecordedOp) -> tuple[str, ...]:
    kinds = set(map(type, _parts_around(recorder, op)))
    takes_option = (kind for kind in kinds if issubclass(kind, torch.nn.RNNBase) or "batch_first" in inspect.signature(kind).parameters)
    return tuple(kind.__name__ for kind in takes_option)


def _is_mistaken(recorder: GraphRecorder, op: RecordedOp) -> bool:
    """Whether the op is one that should not see several samples. Graphs, contrastive losses and statistics of a batch are meant to."""
    if op.name in {"_softmax", "_log_softmax"}:
        consumers = recorder.tape.consumers().get(op.index, ())
        return bool(op.root) and not any(consumer.name.startswith("nll_loss") for consumer in consumers)  # the loss itself, or a part of it
    if op.name in _REDUCTIONS:
        return bool(op.root) and op.makes[0].shape == () and _is_set_against_rows(recorder, op)
    part = next(reversed(_parts_around(recorder, op)), None)
    shape = next((use.shape for use in op.reads if len(use.shape) > 1), (1, 1))
    if isinstance(part, torch.nn.RNNBase):
        return shape[-2] > 1  # else a single sequence, which has no batch
    return (
        isinstance(part, torch.nn.MultiheadAttention)
        and not part.batch_first
        and shape[0] > (1 if len(shape) == _IMAGE_DIMENSIONS else part.num_heads)
    )


def _is_set_against_rows(recorder: GraphRecorder, op: RecordedOp) -> bool:
    """Whether the number is subtracted from values of each sample, in the same model, unless it normalizes what the model was given."""
    reduced = op.reads[0]
    for consumer in recorder.tape.consumers().get(op.index, ()):
        others = [use for use in consumer.reads if len(use.shape) > 1 and use.shape[:1] == reduced.shape[:1]]
        is_of_others = others and all(use.memory != reduced.memory or reduced.requires_grad for use in others)
        is_between = consumer.root == op.root and consumer.name in {"sub", "sub_"} and math.prod(reduced.shape[1:]) > 1
        if is_between and is_of_others and _is_of_rows_at_the_end(recorder, consumer, reduced.shape[0]):
            return True
    return False


def _is_of_rows_at_the_end(recorder: GraphRecorder, op: RecordedOp, samples_count: int) -> bool:
    """Whether what a model with parameters computes from it has a row for each sample at the end; a loss that a model returns has none."""
    consumers = recorder.tape.consumers()
    inside = list(walk([op], lambda maker: [each for each in consumers.get(maker.index, ()) if each.root == op.root]))
    ends = [each for each in inside if all(later.root != op.root for later in consumers.get(each.index, ()))]
    has_parameters = any(True for part in _parts_around(recorder, op)[:1] for _ in part.parameters())
    return has_parameters and any(made.shape[:1] == (samples_count,) for each in ends for made in each.makes)


def _only_normalises(recorder: GraphRecorder, op: RecordedOp) -> bool:
    """Whether nothing is weighed by a softmax, as attention does: along its dimension it has nothing to compare but samples."""
    consumers = recorder.tape.consumers()
    read_by = walk([op], lambda maker: [each for each in consumers.get(maker.index, ()) if maker is op or maker.name in _LAYS_OUT])
    return "softmax" in op.name and not any(each.name in _PRODUCTS for each in read_by)


def _other_dimension(mixing: Mixing) -> str:
    """The statement with another dimension in its softmax."""
    op, source = mixing.op, mixing.op.source
    others = [place for place, size in enumerate(op.reads[0].shape) if size not in {1, mixing.samples_count}]
    wanted = others[0] if len(others) == 1 else -1
    for node in nodes(ast.Call, parsed(source)):
        if called(node).endswith("softmax"):
            given = next((keyword.value for keyword in node.keywords if keyword.arg == "dim"), node.args[-1] if node.args else None)
            text = "" if given is None else ast.unparse(given)
            if given is not None and text.lstrip("-").isdigit() and source.isascii() and int(text) != wanted:
                return f"`{source[: given.col_offset]}{wanted}{source[given.end_col_offset :]}`"
    is_module = op.module_type in {"Softmax", "LogSoftmax"}
    return f"set `dim={wanted}` " + (f"where `{op.module}` is created" if is_module else f"in `{source}`")
