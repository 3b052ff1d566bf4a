"""Errors that a backward pass raises by itself: custom functions, checkpoints, second derivatives, and others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from types import FunctionType, GeneratorType

import torch

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.autograd.errors.cut import freezing_line
from torchdebug_magics.instruments.autograd.errors.raised import Raised, missing_gradient_of, parts_of_value
from torchdebug_magics.instruments.autograd.faults.left_out import hidden_parameters
from torchdebug_magics.instruments.autograd.named import attribute_line
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.probing.source.call_sites import function_node
from torchdebug_magics.probing.syntax import nodes
from torchdebug_magics.probing.where import location
from torchdebug_magics.report import Location

_CHECKPOINT = re.compile(r"\bcheckpoint(?:_sequential)?\(")
_OTHER_FIXES = (
    (r"Can't call numpy\(\)", "replace `.numpy()` with `.detach().numpy()`"),
    (r"graph leaves", "use `copy.deepcopy(tensor.detach())`, or delete the attribute that holds the computed tensor before the copy"),
    (r"requires_grad flags of leaf", "`.detach()` the tensor, or set `requires_grad` on the leaf that it was computed from"),
    (
        r"can't retain_grad|register a hook",
        "call this on a tensor that requires a gradient; `%autograd NAME` shows where the graph of a tensor was cut",
    ),
    (r"assigned grad has data|attempting to assign a gradient", "assign a tensor with the parameter's shape, dtype and device to `.grad`"),
    (r"has changed the", "return a gradient of the same shape, dtype and device from the hook, or None"),
    (
        r"invalid gradient at index|size of tensor a",
        "set `.grad = None` after you assign `.data` of another shape, dtype or device, and run the forward again",
    ),
)


def custom_function(raised: Raised) -> AutogradFinding:
    """Explains a custom Function whose backward returned the wrong number, kind or shape of gradients."""
    message = raised.message
    named = re.search(r"[Ff]unction (\w+?)Backward\b", message)
    functions = (kind for kind in _subclasses(torch.autograd.Function) if named is not None and kind.__name__ == named[1])
    where = _return_of(getattr(next(functions, None), "backward", None)) or raised.here
    counts = re.search(r"expected (\d+), got (\d+)", message)
    shapes = re.search(r"at index (\d+) - got (\[[\d, ]*\]) but expected shape compatible with (\[[\d, ]*\])", message)
    place = re.search(r"position (\d+)", message)
    name = named[1] if named is not None else "the function"
    headline, fix = f"`{name}.backward`: {message.splitlines()[0]}", "return one gradient, or None, for each input of forward"
    if counts is not None:
        headline = f"`{name}.backward` returns {plural(int(counts[2]), 'gradient')}, but `forward` takes {plural(int(counts[1]), 'input')}"
        fix = f"return {plural(int(counts[1]), 'value')} from `{name}.backward`, one for each input; `None` where there is no gradient"
    elif shapes is not None:
        headline = f"`{name}.backward` returns shape {shapes[2]} for input {shapes[1]} of shape {shapes[3]}"
        fix = f"return a gradient of the shape of input {shapes[1]}: reduce it with `.sum(dim)`, or reshape it with `.view_as(input)`"
    elif "different than None" in message:
        headline = f"`{name}.backward` returns a gradient for an input that is not a tensor"
        fix = f"return `None` at position {place[1]}" if place else "return `None` for that input"
    return raised.finding(headline, fix, where, op=name, first_backward_at=raised.here if where != raised.here else None)


def _subclasses(kind: type) -> Iterator[type]:
    """The latest first."""
    inner: type
    for inner in reversed(kind.__subclasses__()):
        yield inner
        yield from _subclasses(inner)


def _return_of(function: object) -> Location | None:
    """The last ``return`` of a function."""
    code = getattr(function, "__code__", None)
    lines = [one.lineno for one in nodes(ast.Return, function_node(code))] if code is not None else []
    return location(code.co_filename, lines[-1], code.co_name) if lines and code is not None else None


def checkpoint_mismatch(raised: Raised) -> AutogradFinding:
    """Explains a checkpointed function that gave different tensors when backward() recomputed it."""
    calls = (line.location for op in raised.tape.ops for line in op.calls if _CHECKPOINT.search(line.location.source))
    return raised.finding(
        "recomputing a checkpointed function gave different tensors",
        "make the function depend on its arguments alone: no counters, `training` flags or lists that change between the two runs",
        next(calls, None),
        first_backward_at=raised.here,
        explanation=raised.message.splitlines()[0].removeprefix("torch.utils.checkpoint: "),
    )


def no_double_backward(raised: Raised) -> AutogradFinding:
    """Explains an op or function without a second derivative."""
    named = re.search(r"derivative for '?(?:aten::)?(\w+)", raised.message)
    op = named[1] if named is not None else None
    attention = op is not None and "scaled_dot_product" in op
    return raised.finding(
        f"`{op or 'the function'}` cannot be differentiated twice",
        "put `with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):` around the forward"
        if attention
        else f"drop `create_graph=True` where no second derivative is needed, or replace `{op}` with ops that can be differentiated twice"
        if op
        else "remove `@once_differentiable` and write backward() with differentiable ops",
        op=op,
    )


def other_error(raised: Raised) -> AutogradFinding:
    """Any other autograd error, with the fix for its message."""
    first = raised.message.splitlines()[0].rstrip(".")
    missing = missing_gradient_of(raised.statement, raised.frames[0][0]) if raised.frames else None
    if missing is not None and "NoneType" in first:
        return _missing(raised, *missing)
    if "empty parameter list" in first:
        return _empty_optimizer(raised)
    if "can't optimize a non-leaf" in first:
        return _not_a_leaf(raised)
    fix = next((fix for pattern, fix in _OTHER_FIXES if re.search(pattern, raised.message)), "")
    name = next((one.name for one in raised.reads() if fix and one.place == raised.here and isinstance(one.value, torch.Tensor)), None)
    hook = re.search(r"hook '(\w+)' has changed", first)
    hooks = (value for _, value in raised.variables() if type(value) is FunctionType and hook is not None and value.__name__ == hook[1])
    where = _return_of(next(hooks, None))
    return raised.finding(first, fix, where, tensor=name, first_backward_at=raised.here if where is not None else None)


def _not_a_leaf(raised: Raised) -> AutogradFinding:
    """Explains an optimizer that received the output of an op."""
    read = ((one.name, part) for one in raised.reads() for part in parts_of_value(one.value))
    name, tensor = next(((name, part) for name, part in read if not part.is_leaf), ("the tensor", None))
    made = raised.tape.origin(id(tensor))
    op = made.name if made is not None else None
    return raised.finding(
        f"`{name}` is not a leaf, and cannot be optimized",
        f"run `{name} = {name}.detach().requires_grad_()` before creating the optimizer",
        (made.where if made is not None else None) or raised.assigned_at(name),
        op=op,
        tensor=name,
        explanation=f"{f'`{op}`' if op else 'an op'} computed it; backward() stores gradients in leaves only, so its `.grad` stays None",
    )


def _missing(raised: Raised, name: str, tensor: torch.Tensor) -> AutogradFinding:
    headline, why = f"`{name}.grad` is None: `{name}` is not a leaf", "backward() stores gradients in leaves only"
    fix = f"call `{name}.retain_grad()` before backward()"
    if tensor.is_leaf:
        headline, why = f"`{name}.grad` is None: no backward() has reached it", ""
        fix = f"call backward() on a loss that uses `{name}` before this line"
        fix = fix if tensor.requires_grad else f"call `{name}.requires_grad_()` before its first use"
    return raised.finding(headline, fix, tensor=name, explanation=why)


def _empty_optimizer(raised: Raised) -> AutogradFinding:
    """Explains an empty parameter list from the names on the line that creates the optimizer."""
    read = [(one.name, one.value) for one in raised.reads() if one.place == raised.here]
    for name, model in read:
        if not isinstance(model, torch.nn.Module):
            continue
        if hidden := list(hidden_parameters(model)):
            kept = hidden[0].attribute
            return raised.finding(
                f"`{name}` has no parameters: its modules are in the container `{kept}`",
                f"keep the modules of `{kept}` in an `nn.ModuleList`",
                attribute_line(hidden[0].owner, kept),
                parameters=tuple(one.name for one in hidden),
                tensor=hidden[0].name,
                explanation="`parameters()` does not search plain lists and dicts",
            )
        if frozen := tuple(path for path, one in model.named_parameters() if not one.requires_grad):
            fix = f"set `requires_grad = True` for the parameters to train, such as `{frozen[-1]}`"
            return raised.finding(f"all parameters of `{name}` are frozen", fix, freezing_line(raised), parameters=frozen)
    for name, value in read:
        if isinstance(value, GeneratorType) and value.gi_frame is None:
            made = raised.assigned_at(name)
            source = f" (`{made.source}`)" if made is not None else ""
            fix = f"pass the optimizer a new list, such as `list(model.parameters())`, not the generator `{name}`{source}"
            return raised.finding(f"`{name}` is a generator that is already exhausted", fix)
    return raised.finding("the optimizer received no parameters", "pass the parameters of the model to train: `model.parameters()`")
