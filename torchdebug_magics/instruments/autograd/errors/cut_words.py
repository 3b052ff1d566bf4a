"""A cut graph in words: the headline, the fix, the line to change."""

from __future__ import annotations

import ast
import io
import tokenize
from contextlib import suppress
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.autograd.errors.dropped_gradient import gradient_switch

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.errors.dropped_gradient import Dropped
    from torchdebug_magics.instruments.autograd.recording.tape import RecordedOp
    from torchdebug_magics.report import Location

__all__ = ["cut_words", "words_for_text"]

_SWITCHES = {"no_grad": "torch.no_grad()", "inference_mode": "torch.inference_mode()"}
_MAKERS = frozenset({"tensor", "as_tensor", "from_numpy", "FloatTensor", "Tensor"})
_READERS = frozenset({"item", "tolist", "detach", "cpu", "numpy"})
_LOSES = ("np.", "numpy", ".item()", ".tolist()", "detach")


def cut_words(dropped: Dropped) -> tuple[str, str, Location | None]:
    """(headline, fix, the line to change)."""
    op, cause = dropped
    line = op.line.location if op.line is not None else None
    around = gradient_switch(op) if cause in {"no_grad", "inference_mode"} else None
    where, inside = around or (line, line)
    return *_words(cause, op, inside, where), where


def _without_comment(line: str) -> str:
    with suppress(tokenize.TokenError, SyntaxError):  # a part of a longer statement
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            if token.type == tokenize.COMMENT:
                return line[: token.start[1]].rstrip()
    return line


def _words(cause: str, op: RecordedOp, line: Location | None, where: Location | None) -> tuple[str, str]:
    source = _without_comment(line.source) if line is not None else ""
    match cause:
        case "no_grad" | "inference_mode" if where is not None and "checkpoint" in where.source:
            return "no input of the reentrant checkpoint requires a gradient", _not_reentrant(where.source)
        case "no_grad" | "inference_mode":
            switch = (
                _SWITCHES[cause] if where is line or where is None else _without_comment(where.source).removeprefix("with ").rstrip(":")
            )
            what = f"`{op.name}` ran under `{switch.removeprefix('@')}`: the loss has no graph"
            if switch.startswith("@") and where is not None:
                fix = f"remove `{switch}` from `{where.function}`"
            else:
                fix = f"move `{source}` out of `{switch}`" if where != line else f"remove `{switch}` around `{source}`"
            return what, fix
        case "detach":
            return "`detach` cut the graph between the parameters and the loss", _without(source, ".detach()")
        case "data":
            return "`.data` cut the graph between the parameters and the loss", _without(source, ".data")
        case "dtype":
            return f"`{op.name}` has no derivative: its output is an integer or a bool", _instead_of_op(op.name, source)
    headline = "values were copied into a new tensor, which has no graph"
    return headline, _not_rewrapped(source, of_list=cause == "list")


def words_for_text(op: str, where: Location | None) -> tuple[str, str]:
    """(headline, fix) of a cut that was read from the source, by its ATen op."""
    source = where.source if where is not None else ""
    match op:
        case "no_grad":
            return "the loss was computed with gradients off", f"compute the loss outside of `{source.rstrip(':')}`"
        case "detach":
            part = ".data" if ".data" in source else ".detach()"
            return f"`{part}` cut the graph between the parameters and the loss", _without(source, part)
        case "lift_fresh" | "_local_scalar_dense":
            return "values were copied into a new tensor, which has no graph", _not_rewrapped(source)
    return f"`{op}` has no derivative", _instead_of_op(op, source)


def _not_reentrant(source: str) -> str:
    changed = source.replace("use_reentrant=True", "use_reentrant=False")
    return f"`{changed}`" if changed != source else f"add `use_reentrant=False` to `{source}`"


def _without(source: str, part: str) -> str:
    return f"`{source.replace(part, '')}`" if part in source else f"remove the `{part}` from `{source}`"


def _instead_of_op(op: str, source: str) -> str:
    if op in {"argmax", "argmin", "max", "min"}:
        return f"compute the loss from the logits, not from `{source}`: `F.cross_entropy(logits, target)`"
    return f"compute the loss without `{source}`: a comparison, rounding or cast to integers has no derivative (use a sigmoid or softmax)"


def _not_rewrapped(source: str, *, of_list: bool = False) -> str:
    """The statement without the copy into a new tensor; advice where its text does not show how."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        tree = ast.Module([], [])
    changed = _Unwrap(of_list=of_list).visit(tree)
    code = ast.unparse(changed)
    if tree.body and code != ast.unparse(ast.parse(source)) and not any(part in code for part in _LOSES):
        return f"`{code}`"
    return f"stay with PyTorch ops in `{source}`: NumPy, `.item()` and `torch.tensor(...)` drop the graph"


class _Unwrap(ast.NodeTransformer):
    """``torch.tensor(x.item())`` -> ``x``; ``torch.tensor([a.item(), b])`` -> ``torch.stack([a, b])``."""

    def __init__(self, *, of_list: bool) -> None:
        self.of_list = of_list
        """Whether what is wrapped is a list of tensors."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = ast.unparse(node.func).rpartition(".")[2]
        if name not in _MAKERS or not node.args:
            return node
        value = node.args[0]
        if isinstance(value, (ast.List, ast.Tuple)):
            parts: ast.expr = ast.List([_stripped(one) for one in value.elts], ast.Load())
        elif isinstance(value, (ast.ListComp, ast.GeneratorExp)):
            parts = ast.ListComp(_stripped(value.elt), value.generators)
        elif self.of_list:
            parts = value
        else:
            return _stripped(value)
        return ast.Call(ast.parse("torch.stack", mode="eval").body, [parts], [])


def _stripped(value: ast.expr) -> ast.expr:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _READERS and not value.args:
        value = value.func.value
    return value
