"""The error that ended a cell, as a finding: one function for each kind."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable

import torch

from torchdebug_magics.instruments.autograd.errors.cut import cut_graph
from torchdebug_magics.instruments.autograd.errors.in_backward import checkpoint_mismatch, custom_function, no_double_backward, other_error
from torchdebug_magics.instruments.autograd.errors.inplace import modified_in_place, nodes_of
from torchdebug_magics.instruments.autograd.errors.raised import Raised
from torchdebug_magics.instruments.autograd.errors.second_backward import second_time
from torchdebug_magics.instruments.autograd.named import named_members
from torchdebug_magics.instruments.autograd.report import AutogradFinding, Kind
from torchdebug_magics.instruments.autograd.source import loop_around, out_of_place, through_the_base
from torchdebug_magics.instruments.autograd.tape import Course, Tape
from torchdebug_magics.probing.syntax import as_atom, called, nodes

_SHAPES = re.compile(r"has a shape of torch\.Size\(\[([\d, ]*)\]\)")
_NO_REDUCTION = re.compile(r"reduction\s*=\s*['\"]none['\"]")


def explained(error: BaseException, tape: Tape | None = None, course: Course | None = None) -> AutogradFinding | None:
    """Of an error, or of one while which it was raised; None where autograd raised none. Nothing of the user's runs again."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        if (raised := Raised.of(inner, tape or Tape(), course or Course())) is not None:
            return _BY_KIND.get(raised.kind, other_error)(raised)
        inner = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)
    return None


def _leaf(raised: Raised) -> AutogradFinding:
    name, op = raised.writes()
    fresh = name.rpartition(".")[2] if name and name.replace(".", "").isidentifier() else "copy"
    copied = f"`{fresh} = {name}.clone()`" if name else "`.clone()`"
    update = f"`with torch.no_grad(): {raised.code}` for a manual update; otherwise write into a copy: {copied}"
    return raised.finding(
        f"in-place write to {f'`{name}`' if name else 'a parameter'}, a leaf that requires grad",
        _not_inplace(raised) or update,
        tensor=name,
        writer_op=op,
        module=raised.module,
        explanation="the gradient of a leaf belongs to its original value, which an in-place write would lose",
    )


def _not_inplace(raised: Raised) -> str:
    """The fix for a module created with ``inplace=True``; empty for any other."""
    writer = raised.modules[0] if raised.modules else None
    if getattr(writer, "inplace", False) is not True:
        return ""
    return f"use `{type(writer).__name__}(inplace=False)` for {f'module `{raised.module}`' if raised.module else 'the module'}"


def _view(raised: Raised) -> AutogradFinding:
    name, writer_op = raised.writes()
    made = re.search(r"Output \d+ of (\w+?)(?:Backward\d*)? is a view", raised.message)
    maker = next((op for op in reversed(raised.tape.ops) if made is not None and op.name.replace("_", "") == made[1].lower()), None)
    op = maker.name if maker is not None else made[1] if made is not None else None
    what, why = f"a view returned by `{op}`", "a write to one of several views would have to change the gradient of all"
    loop = loop_around(raised.here)
    copied = through_the_base(raised.statement, loop) or out_of_place(raised.statement)
    fix = f"`{copied}`" if copied else _not_inplace(raised) or f"write into a copy: `{name or 'view'}.clone()`"
    if "view of a leaf" in raised.message:
        what, why = "a view of a leaf that requires grad", ""
        fix = f"`with torch.no_grad(): {raised.code}`, or write into {f'`{name}.clone()`' if name else 'a copy (`.clone()`)'}"
    elif "no_grad" in raised.message or "inference" in raised.message:
        what, why = "a view created with gradients off", "gradients were off when the view was created"
    elif "custom Function" in raised.message:
        what = "the output of a full backward hook" if "BackwardHook" in raised.message else what
        why = "an in-place write would replace the backward of the hook or custom Function"
    return raised.finding(
        f"in-place write to {f'`{name}`' if name else 'a tensor'}, {what}",
        fix,
        op=op,
        saved_at=maker.where if maker is not None else None,
        tensor=name,
        writer_op=writer_op,
        module=raised.module,
        explanation=why,
    )


def _of_gradient(raised: Raised) -> AutogradFinding | None:
    """The gradient that is given to ``backward()`` has another shape than what it is the gradient of; None where none is given."""
    call = next((node for node in nodes(ast.Call, raised.statement) if called(node) == "backward"), None)
    shapes = [f"[{shape}]" for shape in _SHAPES.findall(raised.message)]
    given = [] if call is None else [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "gradient")]
    if call is None or len(shapes) != 2 or not given or not isinstance(call.func, ast.Attribute):  # noqa: PLR2004 - given, and asked for
        return None
    loss, gradient = ast.unparse(call.func.value), ast.unparse(given[0])
    sizes = [math.prod(ast.literal_eval(shape)) for shape in shapes]
    fits = f"reshape({loss}.shape)" if sizes[0] == sizes[1] else f"expand_as({loss})" if sizes[0] == 1 else ""
    other = f"pass a gradient of shape {shapes[1]}, or reduce `{loss}` to one number before backward(): `.mean()` or `.sum()`"
    return raised.finding(
        f"`{gradient}`, the gradient given to backward(), has shape {shapes[0]}, and `{loss}` has {shapes[1]}",
        f"`{loss}.backward({as_atom(given[0])}.{fits})`" if fits else other,
        tensor=loss,
        explanation="the gradient of a tensor has its shape",
    )


def _non_scalar(raised: Raised) -> AutogradFinding:
    if (of_gradient := _of_gradient(raised)) is not None:
        return of_gradient
    root, name = next(iter(raised.roots), None), raised.root_name
    made = raised.tape.origin(id(root))
    where = (made.where if made is not None else None) or raised.assigned_at(name) or raised.here
    source, backward = where.source if where is not None else "", raised.code
    fix = "reduce the loss to one number before backward(): `.mean()` or `.sum()`"
    if _NO_REDUCTION.search(source):
        reduced = _NO_REDUCTION.sub('reduction="mean"', source)
        fix = f"`{reduced}`"
    elif name and f"{name}.backward" in backward:
        fix = f"`{backward.replace(f'{name}.backward', f'{name}.mean().backward')}`"
    shape = f"shape {list(root.shape)}" if root is not None else "several elements"
    return raised.finding(
        f"{f'`{name}`' if name else 'the loss'} has {shape}, and backward() needs a scalar",
        fix,
        where,
        op=made.name if made is not None else None,
        first_backward_at=raised.here if where != raised.here else None,
        tensor=name,
        module=made.module if made is not None else None,
    )


def _inference(raised: Raised) -> AutogradFinding:
    made = next((op for op in reversed(raised.tape.ops) if op.inference and op.makes), None)
    # The outermost line: where it comes in from outside.
    read = next((one for one in reversed(raised.reads()) if isinstance(one.value, torch.Tensor) and one.value.is_inference()), None)
    name = read.name if read is not None else None
    return raised.finding(
        f"{f'`{name}`' if name else 'a tensor'} is an inference tensor and cannot be used in training",
        f"run `{name} = {name}.clone()` before this line, or compute `{name}` under `torch.no_grad()`"
        if name
        else "compute the tensor under `torch.no_grad()` in place of `torch.inference_mode()`, or `.clone()` it",
        read.place if read is not None else None,
        saved_at=made.where if made is not None else None,
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
    is_list = isinstance(given, (ast.List, ast.Tuple))
    members = list(given.elts) if isinstance(given, (ast.List, ast.Tuple)) else [given] if given is not None else []
    reached = {id(node.variable) for node in nodes_of(raised.roots) if hasattr(node, "variable")}
    unused = {id(one) for one in raised.inputs if one.is_leaf and id(one) not in reached}
    parameters = tuple(name for name, one in named_members() if id(one) in unused)
    if len(members) == len(raised.inputs):
        place = next((number for number, one in enumerate(raised.inputs) if id(one) in unused), place)
    name = ast.unparse(members[place]) if place < len(members) and (is_list or not parameters) else next(iter(parameters), None)
    return raised.finding(
        f"{f'`{name}`' if name else f'input {place}'} was not used to compute the outputs",
        "pass the tensor that the outputs were computed from, or `allow_unused=True` to get None for it",
        tensor=name,
        parameters=parameters,
        explanation=f"a view, a copy or a `.detach()` of `{name}` is a different tensor to autograd" if name and not parameters else "",
    )


def _integer(raised: Raised) -> AutogradFinding:
    source = raised.here.source if raised.here is not None else ""
    in_call = r"torch\.tensor\(([^()]*\[[^\]]*\][^()]*?)(, *requires_grad *= *True)\)"
    fixed = re.sub(in_call, r"torch.tensor(\1, dtype=torch.float32\2)", source)
    fixed = fixed if fixed != source else re.sub(r"(\w+)\.requires_grad_\(", r"\1.float().requires_grad_(", source)
    # ``ids`` of ``ids.requires_grad_()``, of ``ids.requires_grad = True`` and of ``ids = torch.tensor(..., requires_grad=True)``
    attributes = (node.value for node in nodes(ast.Attribute, raised.statement) if node.attr in {"requires_grad_", "requires_grad"})
    name = next((ast.unparse(one) for one in (*attributes, *getattr(raised.statement, "targets", ()))), None)
    return raised.finding(
        "an integer tensor cannot require a gradient",
        f"`{fixed}`" if fixed != source else "make the tensor floating point first: `.float()` or `dtype=torch.float32`",
        tensor=name,
        explanation="only floating-point and complex tensors can have gradients",
    )


_BY_KIND: dict[Kind, Callable[[Raised], AutogradFinding]] = {
    "inplace": modified_in_place,
    "second_backward": second_time,
    "cut": cut_graph,
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
