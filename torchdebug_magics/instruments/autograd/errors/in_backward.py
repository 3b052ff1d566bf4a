"""Errors that a backward pass raises by itself: custom functions, checkpoints, second derivatives, and others."""

from __future__ import annotations

import ast
import re
from types import FunctionType, GeneratorType

import torch

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.autograd.errors.cut import freezing_line
from torchdebug_magics.instruments.autograd.errors.raised import Raised, missing_gradient_of, parts_of_value, statement_at
from torchdebug_magics.instruments.autograd.named import attribute_line, cell_files
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.silences.left_out import hidden_parameters
from torchdebug_magics.probing.source.call_sites import function_node, value_of
from torchdebug_magics.probing.syntax import nodes, tree_of
from torchdebug_magics.probing.where import excerpt, location
from torchdebug_magics.report import Location

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
    named = re.search(r"[Ff]unction (\w+?)Backward\b", raised.message)
    function = next((kind for kind in _subclasses(torch.autograd.Function) if named is not None and kind.__name__ == named[1]), None)
    where = _return_of(getattr(function, "backward", None)) or raised.here
    counts = re.search(r"expected (\d+), got (\d+)", raised.message)
    shapes = re.search(r"at index (\d+) - got (\[[\d, ]*\]) but expected shape compatible with (\[[\d, ]*\])", raised.message)
    name = named[1] if named is not None else "the function"
    if counts is not None:
        headline = f"`{name}.backward` returns {plural(int(counts[2]), 'gradient')}, but `forward` takes {plural(int(counts[1]), 'input')}"
        fix = f"return {plural(int(counts[1]), 'value')} from `{name}.backward`, one for each input; `None` where there is no gradient"
    elif shapes is not None:
        headline = f"`{name}.backward` returns shape {shapes[2]} for input {shapes[1]} of shape {shapes[3]}"
        fix = f"return a gradient of the shape of input {shapes[1]}: reduce it with `.sum(dim)`, or reshape it with `.view_as(input)`"
    elif "different than None" in raised.message:
        place = re.search(r"position (\d+)", raised.message)
        headline = f"`{name}.backward` returns a gradient for an input that is not a tensor"
        fix = f"return `None` at position {place[1]}" if place else "return `None` for that input"
    else:
        headline, fix = f"`{name}.backward`: {raised.message.splitlines()[0]}", "return one gradient, or None, for each input of forward"
    return finding_at(raised, headline, fix, where=where, op=name, first_backward_at=raised.here if where != raised.here else None)


def _subclasses(kind: type) -> list[type]:
    found: list[type] = list(kind.__subclasses__())
    return [*reversed(found), *(inner for one in found for inner in _subclasses(one))]


def _return_of(function: object) -> Location | None:
    """The last ``return`` of a function."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    lines = [one.lineno for one in nodes(ast.Return, function_node(code))]
    return location(code.co_filename, lines[-1], code.co_name) if lines else None


def checkpoint_mismatch(raised: Raised) -> AutogradFinding:
    """Explains a checkpointed function that gave different tensors when backward() recomputed it."""
    first = raised.message.splitlines()[0]
    calls = (
        line.location for op in raised.tape.ops for line in op.calls if re.search(r"\bcheckpoint(?:_sequential)?\(", line.location.source)
    )
    return finding_at(
        raised,
        "recomputing a checkpointed function gave different tensors",
        "make the function depend on its arguments alone: no counters, `training` flags or lists that change between the two runs",
        where=next(calls, None),
        first_backward_at=raised.here,
        explanation=first.removeprefix("torch.utils.checkpoint: "),
    )


def no_double_backward(raised: Raised) -> AutogradFinding:
    """Explains an op or function without a second derivative."""
    named = re.search(r"derivative for '?(?:aten::)?(\w+)", raised.message)
    op = named[1] if named is not None else None
    attention = op is not None and "scaled_dot_product" in op
    return finding_at(
        raised,
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
    first = raised.message.splitlines()[0]
    missing = missing_gradient_of(raised.statement, raised.frames[0]) if raised.frames else None
    if missing is not None and "NoneType" in first:
        return _missing(raised, *missing)
    if "empty parameter list" in first:
        return empty_optimizer(raised)
    if "can't optimize a non-leaf" in first:
        return _not_a_leaf(raised)
    held = (name for place, name, value in values_read(raised) if place == raised.here and isinstance(value, torch.Tensor))
    name = next(held, None)
    hook = re.search(r"hook '(\w+)' has changed", first)
    hooks = (value for _, value in raised.variables() if type(value) is FunctionType and hook is not None and value.__name__ == hook[1])
    where = _return_of(next(hooks, None))
    for pattern, fix in _OTHER_FIXES:
        if re.search(pattern, raised.message):
            backward = raised.here if where is not None else None
            return finding_at(raised, first.rstrip("."), fix, tensor=name, where=where, first_backward_at=backward)
    return finding_at(raised, first.rstrip("."), "", tensor=None)


def _not_a_leaf(raised: Raised) -> AutogradFinding:
    """Explains an optimizer that received the output of an op."""
    read = ((name, part) for _, name, value in values_read(raised) for part in parts_of_value(value))
    name, tensor = next(((name, part) for name, part in read if not part.is_leaf), ("the tensor", None))
    made = next((op for op in reversed(raised.tape.ops) if any(use.tensor == id(tensor) for use in op.makes)), None)
    op = made.name if made is not None else None
    return finding_at(
        raised,
        f"`{name}` is not a leaf, and cannot be optimized",
        f"run `{name} = {name}.detach().requires_grad_()` before creating the optimizer",
        where=made.line.location if made is not None and made.line is not None else assigned_before(raised, name),
        op=op,
        tensor=name,
        explanation=f"{f'`{op}`' if op else 'an op'} computed it; backward() stores gradients in leaves only, so its `.grad` stays None",
    )


def _missing(raised: Raised, name: str, tensor: torch.Tensor) -> AutogradFinding:
    if tensor.is_leaf:
        fix = (
            f"call backward() on a loss that uses `{name}` before this line"
            if tensor.requires_grad
            else f"call `{name}.requires_grad_()` before its first use"
        )
        return finding_at(raised, f"`{name}.grad` is None: no backward() has reached it", fix, tensor=name)
    return finding_at(
        raised,
        f"`{name}.grad` is None: `{name}` is not a leaf",
        f"call `{name}.retain_grad()` before backward()",
        tensor=name,
        explanation="backward() stores gradients in leaves only",
    )


def empty_optimizer(raised: Raised) -> AutogradFinding:
    """Explains an empty parameter list from the names on the line that creates the optimizer."""
    read = [(name, value) for place, name, value in values_read(raised) if place == raised.here]
    for name, model in read:
        if not isinstance(model, torch.nn.Module):
            continue
        hidden = list(hidden_parameters(model))
        if hidden:
            kept = hidden[0].attribute
            return finding_at(
                raised,
                f"`{name}` has no parameters: its modules are in the container `{kept}`",
                f"keep the modules of `{kept}` in an `nn.ModuleList`",
                where=attribute_line(hidden[0].owner, kept),
                parameters=tuple(one.name for one in hidden),
                tensor=hidden[0].name,
                explanation="`parameters()` does not search plain lists and dicts",
            )
        members = [(path, one) for path, one in model.named_parameters() if not one.requires_grad]
        if members:
            return finding_at(
                raised,
                f"all parameters of `{name}` are frozen",
                f"set `requires_grad = True` for the parameters to train, such as `{members[-1][0]}`",
                where=freezing_line(raised),
                parameters=tuple(path for path, _ in members),
            )
    for name, value in read:
        if isinstance(value, GeneratorType) and value.gi_frame is None:
            made = assigned_before(raised, name)
            source = f" (`{made.source}`)" if made is not None else ""
            fix = f"pass the optimizer a new list, such as `list(model.parameters())`, not the generator `{name}`{source}"
            return finding_at(raised, f"`{name}` is a generator that is already exhausted", fix)
    return finding_at(raised, "the optimizer received no parameters", "pass the parameters of the model to train: `model.parameters()`")


def finding_at(raised: Raised, headline: str, fix: str, *, where: Location | None = None, **more: object) -> AutogradFinding:
    """At `where`, else at the line that raised."""
    at = where or raised.here
    return AutogradFinding(
        kind=raised.kind,
        raised=True,
        headline=headline,
        location=at,
        fix=fix,
        excerpt=excerpt(at) if at is not None else (),
        **more,  # type: ignore[arg-type]
    )


def values_read(raised: Raised) -> list[tuple[Location, str, object]]:
    """(line, code, value) of the variables and attributes that each of the user's lines reads, the innermost line first."""
    return [
        (place, ast.unparse(node), value_of(node, frame))
        for frame, place in zip(raised.frames, raised.places, strict=True)
        for node in nodes((ast.Name, ast.Attribute), statement_at(place))
        if isinstance(node.ctx, ast.Load)
    ]


def assigned_before(raised: Raised, name: str | None) -> Location | None:
    """The last assignment to the variable before the error, by the text; else the last of an earlier cell."""
    here = raised.here
    for file in dict.fromkeys([*([here.file] if here is not None else ()), *reversed(cell_files())]):
        assigned = nodes(ast.Assign, tree_of(file))
        lines = [node.lineno for node in assigned if any(ast.unparse(target) == name for target in node.targets)]
        before = [line for line in lines if here is None or file != here.file or line <= here.line]
        if before:
            return location(file, max(before), "<module>")
    return None
