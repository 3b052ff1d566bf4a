"""What a loss without a graph may have been meant to be computed from: a tensor on the way to its argument that still has a graph."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from types import FrameType

import torch

from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.probing.source.call_sites import value_of
from torchdebug_magics.probing.source.edited_source import Source
from torchdebug_magics.probing.source.syntax import (
    bound_names,
    exchanged,
    expression,
    lists_around,
    method,
    names_in,
    nodes,
    read_names,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import is_user_code, local_values, location

_MOST = 12
_FORMS = ("{}", "{}.long()", "{}.float()", "{}.squeeze(-1)", "{}.unsqueeze(-1)", "{}.long().squeeze(-1)", "{}.float().unsqueeze(-1)")
"""What the other arguments of a loss may have to be, where what they are compared with has changed."""


def other_losses(finding: AutogradFinding, error: BaseException) -> tuple[AutogradFinding, ...]:
    """The finding with the loss computed from another variable, for each that would do; to be tried."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    return tuple(islice(_of_frame(finding, *frames[-1]), _MOST)) if frames and finding.kind == "cut" else ()


def _of_frame(finding: AutogradFinding, frame: FrameType, line: int) -> Iterator[AutogradFinding]:
    file = frame.f_code.co_filename
    tree, around = tree_of(file), lists_around(tree_of(file), (line, -1, line, -1))
    before = [statement for block, place in reversed(around) for statement in block[:place]]
    here = [statement for statement in around[0][0][around[0][1] :] if statement.lineno == line] if around else []
    passes = [node for node in nodes(ast.Call, *here) if method(node) == "backward"]
    called = next((node.func.value for node in passes if isinstance(node.func, ast.Attribute)), None)
    name = called.id if isinstance(called, ast.Name) else ""
    made = next((each for each in reversed(before) if isinstance(each, ast.Assign) and bound_names(each) == {name}), None)
    if tree is None or made is None or not isinstance(made.value, ast.Call):
        return
    source = Source(location(file, made.lineno, frame.f_code.co_name), tree)
    values = {node: value_of(node, frame) for node in made.value.args}
    cut = [node for node, value in values.items() if isinstance(value, torch.Tensor) and not value.requires_grad]
    for node in cut:
        others = [other for other in cut if other is not node]
        for upstream, form in product(_upstream(node, before[: before.index(made)], frame), _FORMS if others else _FORMS[:1]):
            new = {
                ast.dump(node): expression(upstream),
                **{ast.dump(other): expression(form.format(ast.unparse(other))) for other in others},
            }
            text = ast.unparse(exchanged(made, lambda part, new=new: new.get(ast.dump(part))))  # type: ignore[misc]
            fix = f"compute the loss from `{upstream}`, which has a graph: `{text}`"
            yield replace(finding, fix=fix, edits=(source.replacing(made, text),), fix_state="compiles")


def _upstream(node: ast.expr, before: list[ast.stmt], frame: FrameType) -> list[str]:
    """The variables from which a value was computed, the nearest first, that hold a tensor with a graph and as many rows."""
    names, wanted = local_values(frame), names_in(node)
    value = value_of(node, frame)
    rows = value.shape[:1] if isinstance(value, torch.Tensor) else ()
    met: list[str] = []
    for statement in reversed(before):
        if bound_names(statement) & wanted:
            met += sorted(read_names(statement) - wanted)
            wanted = wanted | read_names(statement)
    values = {name: names.get(name, frame.f_globals.get(name)) for name in met}
    known = {
        name: tensor for name, tensor in values.items() if isinstance(tensor, torch.Tensor) and tensor.grad_fn and tensor.shape[:1] == rows
    }
    return [code for name, tensor in known.items() for code in _as_before(name, tensor, value)]


def _as_before(name: str, tensor: torch.Tensor, value: object) -> list[str]:
    """What stands for a value that was computed from a tensor: for one that is 1 at a single class, its softmax, or the tensor itself."""
    if not isinstance(value, torch.Tensor) or value.shape != tensor.shape or not bool(((value == 0) | (value == 1)).all()):
        return [name]
    dims = [dim for dim in range(1, value.dim()) if bool((value.sum(dim) == 1).all())]
    return [*(f"{name}.softmax(dim={dim})" for dim in dims[:1]), name]
