"""The tuple that a recurrent module or attention returns, used as if it were a tensor: ``x + h``, ``out[:, -1]``, ``out.mean(1)``."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.leaves import named_tensors
from torchdebug_magics.instruments.shapes.repair.edit import CallEdit, Edit
from torchdebug_magics.instruments.shapes.repair.rules.parts import Diagnosis
from torchdebug_magics.instruments.shapes.repair.source import assignments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.instruments.shapes.repair.facts import Facts
    from torchdebug_magics.instruments.shapes.repair.source import Site

__all__ = ["unpacked"]

_RETURN_TUPLES = (torch.nn.RNNBase, torch.nn.MultiheadAttention)
_SAID = re.compile(r"tuple indices must be|unsupported operand type.*'tuple'|'tuple' object has no attribute|can only concatenate tuple")


def unpacked(facts: Facts) -> Diagnosis | None:
    """``out`` is what ``rnn`` returns: (output, state)."""
    site = facts.site
    if site is None or site.statement is None or not _SAID.search(facts.text):
        return None
    for node in ast.walk(site.statement):
        if isinstance(node, ast.Name) and isinstance(site.names.get(node.id), tuple):
            for assigned in assignments(site, node.id):
                if found := _called(facts, site, assigned.value):
                    return _told(facts, found, f"`{node.id}`", f"{node.id}, _ = {ast.unparse(assigned.value)}", site.names[node.id])
        if isinstance(node, ast.expr) and (found := _called(facts, site, node)):
            return _told(facts, found, f"`{ast.unparse(node)}`", f"{ast.unparse(node)}[0]", None)
    return None


def _called(facts: Facts, site: Site, node: ast.expr) -> str | None:
    """The path of the module, where the expression calls one of these kinds."""
    if not isinstance(node, ast.Call):
        return None
    module: Any = site.names.get(next(_names(node.func), ""))
    for name in list(_names(node.func))[1:]:
        module = getattr(module, name, None)
    if not isinstance(module, _RETURN_TUPLES):
        return None
    return next((path for path, one in facts.modules.items() if one is module), None)


def _names(node: ast.expr) -> Iterator[str]:
    """``self``, ``rnn`` of ``self.rnn``."""
    if isinstance(node, ast.Attribute):
        yield from _names(node.value)
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id


def _told(facts: Facts, path: str, what: str, code: str, value: object) -> Diagnosis:
    rest = "state" if isinstance(facts.modules[path], torch.nn.RNNBase) else "weights"
    sizes = next((f", of which the output is {shape(tuple(one.shape))}" for _, one in named_tensors(value)), "")
    sentence = f"{what} is what `{path}` returns, a tuple: (output, {rest}){sizes}"
    first = CallEdit(path, None, lambda args, kwargs: (args, kwargs), lambda output: output[0])
    return Diagnosis(sentence, (Edit(code, "the output, without the rest", 2, calls=(first,)),))
