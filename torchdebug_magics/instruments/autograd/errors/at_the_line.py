"""Errors that PyTorch raises at the line to change: the names, and the fix."""

from __future__ import annotations

import ast
import math
import re

import torch

from torchdebug_magics.instruments.autograd.errors.in_backward import (
    assigned_before,
    checkpoint_mismatch,
    custom_function,
    finding_at,
    no_double_backward,
    other_error,
    values_read,
)
from torchdebug_magics.instruments.autograd.errors.inplace import nodes_of
from torchdebug_magics.instruments.autograd.errors.raised import (
    Raised,
    named_members,
    out_of_place,
    statement_at,
    through_the_base,
    writer_op,
    writes_to,
)
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import loop_around
from torchdebug_magics.instruments.autograd.tape import RecordedOp
from torchdebug_magics.probing.syntax import called, nodes
from torchdebug_magics.report import Location

_SHAPES = re.compile(r"has a shape of torch\.Size\(\[([\d, ]*)\]\)")
_NO_REDUCTION = re.compile(r"reduction\s*=\s*['\"]none['\"]")


def at_the_line(raised: Raised) -> AutogradFinding:
    """The finding for an error raised at the line to change, by kind."""
    return _BY_KIND.get(raised.kind, other_error)(raised)


def _written_name(raised: Raised) -> str | None:
    written = next(writes_to(raised.statement), None) if raised.statement is not None else None
    return written or (raised.name_of(raised.written) if raised.written is not None else None)


def _leaf(raised: Raised) -> AutogradFinding:
    name = _written_name(raised)
    copied = f"`{_fresh(name)} = {name}.clone()`" if name else "`.clone()`"
    update = f"`with torch.no_grad(): {raised.code}` for a manual update; otherwise write into a copy: {copied}"
    return finding_at(
        raised,
        f"in-place write to {f'`{name}`' if name else 'a parameter'}, a leaf that requires grad",
        _not_inplace(raised) or update,
        tensor=name,
        writer_op=_writer_op(raised),
        module=raised.module,
        explanation="the gradient of a leaf belongs to its original value, which an in-place write would lose",
    )


def _not_inplace(raised: Raised) -> str:
    """The fix for a module created with ``inplace=True``; empty for any other."""
    writer = raised.modules[0] if raised.modules else None
    if getattr(writer, "inplace", False) is not True:
        return ""
    return f"use `{type(writer).__name__}(inplace=False)` for {f'module `{raised.module}`' if raised.module else 'the module'}"


def _fresh(name: str) -> str:
    return name.rpartition(".")[2] if name.replace(".", "").isidentifier() else "copy"


def _writer_op(raised: Raised) -> str | None:
    return writer_op(raised.statement) or writer_op(statement_at(raised.innermost))


def _view(raised: Raised) -> AutogradFinding:
    name = _written_name(raised)
    called = f"`{name}`" if name else "a tensor"
    if "view of a leaf" in raised.message:
        return finding_at(
            raised,
            f"in-place write to {called}, a view of a leaf that requires grad",
            f"`with torch.no_grad(): {raised.code}`, or write into {f'`{name}.clone()`' if name else 'a copy (`.clone()`)'}",
            tensor=name,
            writer_op=_writer_op(raised),
            module=raised.module,
        )
    made = re.search(r"Output \d+ of (\w+?)(?:Backward\d*)? is a view", raised.message)
    maker = next((op for op in reversed(raised.tape.ops) if made is not None and op.name.replace("_", "") == made[1].lower()), None)
    op = maker.name if maker is not None else made[1] if made is not None else None
    if "no_grad" in raised.message or "inference" in raised.message:
        what, why = "a view created with gradients off", "gradients were off when the view was created"
    elif "custom Function" in raised.message:
        what = "the output of a full backward hook" if "BackwardHook" in raised.message else f"a view returned by `{op}`"
        why = "an in-place write would replace the backward of the hook or custom Function"
    else:
        what, why = f"a view returned by `{op}`", "a write to one of several views would have to change the gradient of all"
    return finding_at(
        raised,
        f"in-place write to {called}, {what}",
        _out_of_view(raised, name),
        op=op,
        saved_at=_line(maker),
        tensor=name,
        writer_op=_writer_op(raised),
        module=raised.module,
        explanation=why,
    )


def _out_of_view(raised: Raised, name: str | None) -> str:
    """The same write, into a copy."""
    statement = raised.statement
    loop = loop_around(raised.here) if raised.here is not None else None
    if statement is not None and (code := through_the_base(statement, loop) or out_of_place(statement)):
        return f"`{code}`"
    return _not_inplace(raised) or f"write into a copy: `{name or 'view'}.clone()`"


def _line(op: RecordedOp | None) -> Location | None:
    return op.line.location if op is not None and op.line is not None else None


def _of_gradient(raised: Raised) -> AutogradFinding | None:
    """The gradient that is given to ``backward()`` has another shape than what it is the gradient of; None where none is given."""
    call = next(
        (node for node in nodes(ast.Call, raised.statement) if called(node) == "backward" and isinstance(node.func, ast.Attribute)), None
    )
    shapes = [f"[{shape}]" for shape in _SHAPES.findall(raised.message)]
    given = [] if call is None else [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "gradient")]
    if call is None or len(shapes) != 2 or not given or not isinstance(call.func, ast.Attribute):  # noqa: PLR2004 - given, and asked for
        return None
    loss, gradient = ast.unparse(call.func.value), ast.unparse(given[0])
    value = gradient if isinstance(given[0], (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({gradient})"
    sizes = [math.prod(ast.literal_eval(shape)) for shape in shapes]
    fits = f"reshape({loss}.shape)" if sizes[0] == sizes[1] else f"expand_as({loss})" if sizes[0] == 1 else ""
    other = f"pass a gradient of shape {shapes[1]}, or reduce `{loss}` to one number before backward(): `.mean()` or `.sum()`"
    return finding_at(
        raised,
        f"`{gradient}`, the gradient given to backward(), has shape {shapes[0]}, and `{loss}` has {shapes[1]}",
        f"`{loss}.backward({value}.{fits})`" if fits else other,
        tensor=loss,
        explanation="the gradient of a tensor has its shape",
    )


def _non_scalar(raised: Raised) -> AutogradFinding:
    if (of_gradient := _of_gradient(raised)) is not None:
        return of_gradient
    root = raised.roots[0] if raised.roots else None
    name = raised.name_of(root) if root is not None else None
    made = None if root is None else next((op for op in reversed(raised.tape.ops) if any(use.tensor == id(root) for use in op.makes)), None)
    where = _line(made) or assigned_before(raised, name) or raised.here
    source = where.source if where is not None else ""
    backward = raised.code
    reduced = _NO_REDUCTION.sub('reduction="mean"', source)
    if reduced != source:
        fix = f"`{reduced}`"
    elif name and f"{name}.backward" in backward:
        fix = f"`{backward.replace(f'{name}.backward', f'{name}.mean().backward')}`"
    else:
        fix = "reduce the loss to one number before backward(): `.mean()` or `.sum()`"
    shape = f"shape {list(root.shape)}" if root is not None else "several elements"
    return finding_at(
        raised,
        f"{f'`{name}`' if name else 'the loss'} has {shape}, and backward() needs a scalar",
        fix,
        where=where,
        op=made.name if made is not None else None,
        first_backward_at=raised.here if where != raised.here else None,
        tensor=name,
        module=made.module if made is not None else None,
    )


def _inference(raised: Raised) -> AutogradFinding:
    made = next((op for op in reversed(raised.tape.ops) if op.inference and op.makes), None)
    read = (
        (name, place) for place, name, value in reversed(values_read(raised)) if isinstance(value, torch.Tensor) and value.is_inference()
    )
    name, where = next(read, (None, raised.here))  # where it comes in from outside
    fix = (
        f"run `{name} = {name}.clone()` before this line, or compute `{name}` under `torch.no_grad()`"
        if name
        else "compute the tensor under `torch.no_grad()` in place of `torch.inference_mode()`, or `.clone()` it"
    )
    return finding_at(
        raised,
        f"{f'`{name}`' if name else 'a tensor'} is an inference tensor and cannot be used in training",
        fix,
        where=where,
        saved_at=_line(made),
        op=made.name if made is not None else None,
        tensor=name,
        module=raised.module,
        explanation="a tensor created under `torch.inference_mode()` has no version counter, which autograd needs",
    )


def _unused(raised: Raised) -> AutogradFinding:
    index = re.search(r"[Tt]ensor at index (\d+)", raised.message)
    place = int(index[1]) if index is not None else 0
    calls = nodes(ast.Call, raised.statement)
    given = next((call.args[1] for call in calls if called(call).endswith("grad") and len(call.args) > 1), None)
    members = list(given.elts) if isinstance(given, (ast.List, ast.Tuple)) else [given] if given is not None else []
    reached = {id(node.variable) for node in nodes_of(raised.roots) if hasattr(node, "variable")}
    unused = {id(one) for one in raised.inputs if one.is_leaf and id(one) not in reached}
    parameters = tuple(name for name, one in named_members() if id(one) in unused)
    if len(members) == len(raised.inputs):
        place = next((number for number, one in enumerate(raised.inputs) if id(one) in unused), place)
    name = ast.unparse(members[place]) if place < len(members) and (isinstance(given, (ast.List, ast.Tuple)) or not parameters) else None
    name = name or next(iter(parameters), None)
    return finding_at(
        raised,
        f"{f'`{name}`' if name else f'input {place}'} was not used to compute the outputs",
        "pass the tensor that the outputs were computed from, or `allow_unused=True` to get None for it",
        tensor=name,
        parameters=parameters,
        explanation=f"a view, a copy or a `.detach()` of `{name}` is a different tensor to autograd" if name and not parameters else "",
    )


def _integer(raised: Raised) -> AutogradFinding:
    source = raised.here.source if raised.here is not None else ""
    fixed = re.sub(
        r"torch\.tensor\(([^()]*\[[^\]]*\][^()]*?)(, *requires_grad *= *True)\)", r"torch.tensor(\1, dtype=torch.float32\2)", source
    )
    fixed = fixed if fixed != source else re.sub(r"(\w+)\.requires_grad_\(", r"\1.float().requires_grad_(", source)
    return finding_at(
        raised,
        "an integer tensor cannot require a gradient",
        f"`{fixed}`" if fixed != source else "make the tensor floating point first: `.float()` or `dtype=torch.float32`",
        tensor=_made_to_require(raised.statement),
        explanation="only floating-point and complex tensors can have gradients",
    )


def _made_to_require(statement: ast.stmt | None) -> str | None:
    """``ids`` of ``ids.requires_grad_()``, of ``ids.requires_grad = True`` and of ``ids = torch.tensor(..., requires_grad=True)``."""
    for node in nodes(ast.Attribute, statement):
        if node.attr in {"requires_grad_", "requires_grad"}:
            return ast.unparse(node.value)
    return next((ast.unparse(target) for target in getattr(statement, "targets", ())), None)


_BY_KIND = {
    "leaf_inplace": _leaf,
    "view_inplace": _view,
    "non_scalar": _non_scalar,
    "inference_tensor": _inference,
    "unused_input": _unused,
    "integer_grad": _integer,
    "custom_function": custom_function,
    "checkpoint_mismatch": checkpoint_mismatch,
    "no_double_backward": no_double_backward,
}
