"""A tensor that NumPy cannot read: it has a graph, or is on a device of which NumPy knows nothing."""

from __future__ import annotations

import ast

import torch

from torchdebug_magics.instruments.autograd.errors.raised import Raised
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.probing.source.edited_source import exchanging
from torchdebug_magics.probing.source.syntax import as_atom, expression, nodes

WORDS = r"Can't call numpy\(\) on Tensor that requires grad|can't convert (?!meta)\S+ device type tensor to numpy"
_ELEMENT = "x"
"""What an element of a list is called in the code of a fix."""


def unread_by_numpy(raised: Raised) -> AutogradFinding | None:
    """Explained where the tensor, or a list of tensors, is read; None where the line does not tell which it is."""
    headline = raised.message.splitlines()[0].partition(". Use")[0].rstrip(".")
    # What is on another device is refused before it is asked for its graph.
    conversion = ".detach().cpu()" if "device type" in headline else ".detach()"
    here = [read for read in raised.reads() if read.place == raised.here]
    tensors = {read.name: read.value for read in here if isinstance(read.value, torch.Tensor)}
    names = {name for name, tensor in tensors.items() if tensor.requires_grad or tensor.device.type != "cpu"} or set(tensors)
    called_on = [node.value for node in nodes(ast.Attribute, raised.statement) if node.attr == "numpy"]
    called_on = [node for node in called_on if ast.unparse(node) not in tensors.keys() - names]
    reads = called_on or [node for node in nodes(ast.Name, raised.statement) if {node.id} == names]
    if len(reads) == 1:
        name = ast.unparse(reads[0])
        edits = exchanging(raised.here, reads[0], expression(f"{as_atom(reads[0])}{conversion}"))
        return raised.finding(headline, f"write `{name}{conversion}` where NumPy reads it", edits=edits, tensor=name)
    if reads:
        return None
    lists = {read.name: elements for read in here if (elements := _tensors_of(read.value))}
    reads = [node for node in nodes(ast.Name, raised.statement) if {node.id} == lists.keys()]
    if len(reads) != 1:
        return None
    name = ast.unparse(reads[0])
    element = ".item()" if all(tensor.numel() == 1 for tensor in lists[name]) else conversion
    code = f"[{_ELEMENT}{element} for {_ELEMENT} in {name}]"
    edits = exchanging(raised.here, reads[0], expression(code))
    return raised.finding(headline, f"write `{code}` in the place of `{name}`", edits=edits, tensor=name)


def _tensors_of(value: object) -> list[torch.Tensor]:
    """What is in a list that holds nothing but tensors."""
    values = list(value) if isinstance(value, (list, tuple)) else []
    tensors = [item for item in values if isinstance(item, torch.Tensor)]
    return tensors if len(tensors) == len(values) else []
