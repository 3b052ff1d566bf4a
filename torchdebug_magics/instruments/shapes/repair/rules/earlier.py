"""Earlier steps at fault: a batch dimension that was lost or missing, and calls of the user's that were meant otherwise.

What would come of a call that is written otherwise is put to the op that failed.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.seen import Made
from torchdebug_magics.instruments.shapes.repair.edit import OpEdit, Repair, ValueChange, as_written, method, together
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand, Sizes
from torchdebug_magics.instruments.shapes.repair.local_call import LocalCall, Mismatch, resized_to
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.size_history import RESHAPES, TURNS, channels_first, maker, of_inputs, steps
from torchdebug_magics.instruments.shapes.repair.source import site_at
from torchdebug_magics.probing.dry_runs.inputs import named_tensors, sizes
from torchdebug_magics.probing.source.syntax import as_atom, expression, last_name

FLAT = method("flatten", 1)
_IMAGES = 4
"""Dimensions."""
_COLORS = {(1,), (3,)}

_JOINS = frozenset(["cat", "concat", "concatenate", "stack"])
_OVER_SEVERAL = frozenset(["mean", "sum", "amax", "amin", "logsumexp"])
_REDUCTIONS = _OVER_SEVERAL | {"max", "min", "argmax", "argmin", "median"}
Write = Callable[[ast.expr, ast.expr], str]
"""The new text, from the user's expression and from the tensor in it."""
Run = Callable[[Any, Any, Any], Any]
"""What is run instead of ``func(*args, **kwargs)``."""


@dataclass(frozen=True, eq=False)
class Earlier:
    """What was done before, in words to put behind the sentence, how to do it instead, and the size that comes then."""

    words: str
    edits: tuple[Repair, ...]
    size: int
    fits: bool = False
    """Whether another size of the input would do, too."""


def earlier(local: LocalCall, mismatch: Mismatch) -> Earlier | None:
    """Why another size than the wanted one came, where the last op is not to blame."""
    facts, x, wanted = local.facts, mismatch.operand, mismatch.wanted
    if mismatch.dim == -1:
        causes = (_unbatched(x), _rebatched(facts, x, wanted), _crossed(facts, x), _taken_apart(x, wanted))
        if cause := next(filter(None, causes), None):
            return cause
    batches = _batches(facts) | {x.sizes[0]}

    def fits(sizes: Sizes) -> bool:
        given = dict.fromkeys(mismatch.places, functools.partial(resized_to, sizes))
        return sizes[:1] != () and sizes[0] in batches and local.gives(given) is not None

    if (call := otherwise(x, fits)) is None:
        return None
    return Earlier(words(*call), call[1], wanted, fits=call[0].op in RESHAPES)


def with_size(facts: FailureFacts, cause: Earlier, wanted: int, name: str) -> tuple[Repair, ...]:
    """The edits of a cause; with the failing module made for what comes then, where that is still another size."""
    if cause.size == wanted:
        return cause.edits
    if not cause.edits:
        return ()
    remade = rebuilt_module(facts.module, facts.path, **dict[str, Any]({name: cause.size}))
    return tuple(together(edit, rebuilt) for edit in cause.edits for rebuilt in remade)


def _unbatched(x: Operand) -> Earlier | None:
    """A picture without a batch: a convolution takes it as one, and what flattens it then takes its channels for the batch."""
    line = list(steps(x.made))
    if len(x.sizes) != 2 or not line or line[-1].number:
        return None
    step = next((made for made in line if _is_unbatched(made) and made.shape[0] == x.sizes[0]), None)
    given = line[-1]
    if step is None or len(given.shape) != len(step.shape) or not given.op.isidentifier():
        return None
    words = f": `{step.module or step.op}` read {shape(step.inputs[0][0])} as one image without a batch"
    edit = Repair(f"{given.op} = {given.op}.unsqueeze(0)", "a batch of 1", 1, inputs={given.op: method("unsqueeze", 0)})
    return Earlier(words, (edit,), math.prod(x.sizes))


def _is_of_pictures(step: Made) -> bool:
    return ("conv" in step.op or "pool" in step.op) and bool(step.inputs)


def _is_unbatched(step: Made) -> bool:
    spatial = next((int(sign) for sign in step.op if sign.isdigit()), 0)
    return _is_of_pictures(step) and len(step.inputs[0][0]) == spatial + 1


def _crossed(facts: FailureFacts, x: Operand) -> Earlier | None:
    """``5`` with ``5 x 1``: each sample with each, which runs without an error and is probably unintended."""
    for step in steps(x.made):
        if step.shape != x.sizes:
            return None
        met = [sizes for sizes, made in step.inputs if of_inputs(made)]
        many = step.shape[0] if step.shape else 0
        if many > 1 and many in _batches(facts) and sorted(met) == [(many,), (many, 1)] and step.shape == (many, many):
            words = f": `{step.op.strip('_')}` of {shape(met[0])} and {shape(met[1])} paired every sample with every other"
            return Earlier(words, (), 0)
    return None


def _rebatched(facts: FailureFacts, x: Operand, wanted: int) -> Earlier | None:
    """``x.view(64, -1)`` of a batch of 32, or ``x.flatten()``: rows of another length than those of the samples.

    That the first dimension was a batch is sure where its rows have the wanted size, or a convolution took the single row's for one.
    """
    line = list(steps(x.made))
    for step in itertools.takewhile(lambda step: len(step.shape) == len(x.sizes), line):
        before: Sizes = step.inputs[0][0] if step.inputs else ()
        if step.op in RESHAPES and len(before) > len(step.shape) and before[0] in _batches(facts) - {step.shape[0]}:
            size, is_row = math.prod(before[1:]), len(step.shape) == 1
            if size == wanted or (is_row and any(_is_of_pictures(made) and not _is_unbatched(made) for made in line)):
                merged = f"merged the batch of {before[0]} into the features"
                words = f": `{step.op}` {merged if is_row else f'made {step.shape[0]} rows of a batch of {before[0]}'}"
                module = facts.modules.get(step.module)
                remade = rebuilt_module(module, step.module, start_dim=1, rank=1) if isinstance(module, nn.Flatten) else []
                return Earlier(words, tuple(remade) or at_step(step, FLAT), size)
    return None


def squeezed(facts: FailureFacts, x: Operand) -> Earlier | None:
    """``x.squeeze()`` that took the batch of one away, too; also of what was then stacked."""
    many = len(x.sizes)
    for step in steps(x.made):
        before: Sizes = step.inputs[0][0] if step.inputs else ()
        if len(step.shape) != many:
            return None
        many -= step.op == "stack"
        if step.op == "squeeze" and not step.args and before[:1] == (1,) and 1 in _batches(facts):
            kept = tuple(dim for dim, size in enumerate(before) if dim and size == 1)
            kept = (-1,) if kept == (len(before) - 1,) else kept
            edits = at_step(step, method("squeeze", kept[0] if len(kept) == 1 else kept))
            return Earlier(": `squeeze` removed the batch dimension", edits, math.prod(before[1:]))
    return None


def _batches(facts: FailureFacts) -> set[int]:
    return {tensor.shape[0] for _, tensor in facts.inputs if tensor.dim() > 1}


def _taken_apart(x: Operand, wanted: int) -> Earlier | None:
    """Where the width of a picture became the features, and its channels are as many as were wanted."""
    for step in steps(x.made):
        sizes, before = step.inputs[0] if step.inputs else ((), None)
        if step.op in RESHAPES and step.shape[-1:] == sizes[-1:] and step.shape[:-1] != sizes[:-1] and sizes[1:2] == (wanted,):
            edits = channels_last(before) if sizes[-1] != wanted else ()
            return Earlier(f": `{step.op}` split {shape(sizes)} as if it were channels-last", edits, wanted) if edits else None
    return None


def channels_last(made: Made | None) -> tuple[Repair, ...]:
    """A picture as a convolution returns it, or an input that looks like one, with its channels last from where it was made."""
    if made is None or len(made.shape) != _IMAGES:
        return ()
    turn, why = method("permute", 0, 2, 3, 1), "the channels last"
    if made.number == 0 and made.op.isidentifier() and made.shape[1:2] in _COLORS and len({*made.shape[2:]}) == 1:
        return (Repair(f"{made.op} = {turn.text(made.op)}", why, 1, inputs={made.op: turn}),)
    site = site_at(*made.line) if made.line is not None and channels_first(made) else None
    if site is None or not isinstance(site.expression, ast.Call):
        return ()
    run = OpEdit(site, made.op, lambda func, args, kwargs: turn.apply(func(*args, **kwargs)))
    return (Repair(turn.text(site.text), why, 1, ops=(run,)),)


def otherwise(x: Operand, fits: Callable[[Sizes], bool]) -> tuple[Made, tuple[Repair, ...]] | None:
    """The last call on the way to a tensor of which, written otherwise, a shape that fits comes; and how it is written then."""
    later: list[Made] = []
    for step in steps(x.made):
        given = [before for before, _ in step.inputs]
        edits: list[Repair] = []
        for write, run, why in _variations(step) if given else ():
            new = _result(step, given, run)
            for following in reversed(later):
                new = _after(following, new)
            if new is not None and new != x.sizes and fits(new):
                edits += called_otherwise(step, write, run, why=why)
        if edits:
            return step, tuple(replace(edit, rank=1 + place) for place, edit in enumerate(edits))
        if (maker(step) is step and step.op != "linear") or _after(step, given[0]) != step.shape:
            return None
        later.append(step)
    return None


def words(step: Made, edits: Sequence[Repair]) -> str:
    """What the call did, to put behind a sentence."""
    return f": `{edits[0].ops[0].site.text}` made {shape(step.shape)} of {' and '.join(shape(sizes) for sizes, _ in step.inputs[:3])}"


def _variations(step: Made) -> Iterator[tuple[Write, Run, str]]:
    """Along other dimensions, or of what has other dimensions."""
    sizes, before = step.inputs[0]
    many = len(sizes)
    if step.op in _JOINS | _REDUCTIONS:
        for dim in (*range(1, many + (step.op == "stack")), 0):
            yield *_along(-1 if dim == many - 1 and step.op in _JOINS - {"stack"} else dim), f"along dimension {dim}"
        if step.op in _OVER_SEVERAL and many >= _IMAGES:
            yield *_along(tuple(range(2, many))), "over the pixels of each channel"
    elif step.op == "__getitem__" and step.args:
        index = step.args[0] if isinstance(step.args[0], tuple) else step.args[:1]
        numbers = [item for item in index if type(item) is int]
        if len(numbers) == 1 and all(item in (slice(None), Ellipsis) for item in index if type(item) is not int):
            for dim in range(many):
                yield *_of_tensor(as_written(f"{{0}}[{':, ' * dim}{numbers[0]}]")), f"position {numbers[0]} of dimension {dim}"
    elif step.op in RESHAPES and many > 2 and channels_first(before):
        yield *_of_tensor(method("mean", tuple(range(2, many)))), f"each channel as one value, instead of `{step.op}`"
    elif step.op in RESHAPES and many == 2:
        yield *_of_tensor(as_written("{0}[:, 1:].reshape(-1)")), "the next word for each"


def _along(dim: Any) -> tuple[Write, Run]:
    """The call with another dimension, by place or by name, as it was given."""

    def write(call: ast.expr, tensor: ast.expr) -> str:
        if not isinstance(call, ast.Call):
            return ""
        args, number, place = [*call.args], expression(repr(dim)), int(tensor in call.args)
        named = next((keyword for keyword in call.keywords if keyword.arg in {"dim", "axis"}), None)
        keywords = [ast.keyword(keyword.arg, number) if keyword is named else keyword for keyword in call.keywords]
        if named is None and len(args) > place:
            args[place] = number
        elif named is None:
            keywords.append(ast.keyword("dim", number))
        return ast.unparse(ast.Call(call.func, args, keywords))

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        name = next((name for name in ("dim", "axis") if name in kwargs), "dim")
        is_placed = len(args) > 1
        return func(args[0], dim, *args[2:], **kwargs) if is_placed else func(*args, **{**kwargs, name: dim})

    return write, run


def _of_tensor(change: ValueChange) -> tuple[Write, Run]:
    """The tensor changed, in the place of the call."""
    return lambda _, tensor: change.text(as_atom(tensor)), lambda _, args, __: change.apply(args[0])


def _after(step: Made, before: Sizes | None) -> Sizes | None:
    """The shape that a later step makes of another one than it had; None where it does not take that."""
    if before is not None and step.op == "linear":
        return (*before[:-1], step.shape[-1]) if before[-1:] == step.inputs[0][0][-1:] else None
    if before is None or (step.shape == step.inputs[0][0] and step.op not in TURNS):
        return before  # such as an activation
    return _result(step, [before], lambda func, args, kwargs: func(*args, **kwargs))


def _result(step: Made, given: Sequence[Sizes], run: Run) -> Sizes | None:
    tensors = [torch.empty(before, device="meta") for before in given]
    func = getattr(torch, step.op, None) or getattr(torch.Tensor, step.op, None)
    try:
        out = run(func, (tensors if step.op in _JOINS else tensors[0], *step.args), {})
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    return next((sizes(tensor) for _, tensor in named_tensors(out)), None)


def at_step(step: Made, change: ValueChange, *, why: str = "") -> tuple[Repair, ...]:
    """What the step was made of, changed in the place of the user's call that made it."""
    return called_otherwise(step, *_of_tensor(change), why=why)


def called_otherwise(step: Made, write: Write, run: Run, *, why: str = "") -> tuple[Repair, ...]:
    """The call, or the subscript, that made this step, done otherwise, where it stands in the user's code."""
    site = site_at(*step.line) if step.line is not None else None
    node = site.expression if site is not None else None
    tensor: ast.expr | None = None
    if isinstance(node, ast.Subscript) and step.op == "__getitem__":
        tensor = node.value
    elif isinstance(node, ast.Call) and last_name(node.func) == step.op:
        tensor = tensor_of(node, len(step.args))
    code = write(node, tensor) if isinstance(node, ast.expr) and tensor is not None else ""
    return (Repair(code, why, 1, ops=(OpEdit(site, step.op, run),)),) if code and site is not None else ()


def tensor_of(call: ast.Call, many: int) -> ast.expr | None:
    """The tensor of ``x.mean(1)`` or of ``torch.mean(x, 1)``: the op had so many other arguments by place."""
    return call.args[0] if len(call.args) == many + 1 else getattr(call.func, "value", None)
