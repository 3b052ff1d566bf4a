"""Sizes that the user's own code gives: of a first hidden state, a table of positions and indices into it, a last batch of one row."""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.seen import Made
from torchdebug_magics.instruments.shapes.repair.edit import OpEdit, Repair, ValueChange, as_typed, as_written
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand, Sizes
from torchdebug_magics.instruments.shapes.repair.rebuild import called_with, made_like, quietly, typed
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis
from torchdebug_magics.instruments.shapes.repair.size_history import RESHAPES, TURNS, of_inputs, steps
from torchdebug_magics.instruments.shapes.repair.source import EditSite, site_at
from torchdebug_magics.probing.source.syntax import copied, enclosing, expression, method, nodes, tree_of

FACTORIES = frozenset(["zeros", "ones", "empty", "rand", "randn", "new_zeros", "new_ones", "new_empty"])
_FINDS = frozenset(["argmax", "argmin", "max", "min", "topk", "sort", "argsort", "multinomial"])
_LAYS_OUT = RESHAPES | TURNS | {"__getitem__", "unsqueeze", "squeeze", "expand", "clone", "contiguous", "to", "long", "detach"}
_MANY = 16
"""Numbers of samples that are no number of features by chance."""
_IDS = (torch.int64, torch.int32)


def created(facts: FailureFacts, operand: Operand, wanted: Sizes, *, rank: int) -> list[Repair]:
    """The call that made it, with the sizes in which it differs from the wanted ones changed."""
    step = next((step for step in steps(operand.made) if step.op in FACTORIES), None)
    if step is None or step.line is None or step.shape != operand.sizes or len(wanted) != len(step.shape):
        return []
    site = site_at(*step.line)
    call = site.expression
    if not isinstance(call, ast.Call) or method(call) != step.op or len(_elements(call)) != len(wanted):
        return []
    new = copied(call)
    parts = _elements(new)
    for at, (now, then) in enumerate(zip(step.shape, wanted, strict=True)):
        if now != then:
            names = site.code.co_varnames[: site.code.co_argcount]
            parts[at] = expression(_told(facts, parts[at], now, then, names))

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name != "size"}
        return func(*(argument for argument in args if isinstance(argument, torch.Tensor)), wanted, **given)

    named = site.statement if isinstance(site.statement, ast.Assign) and site.statement.value is call else None
    targets = "".join(f"{ast.unparse(target)} = " for target in named.targets) if named is not None else ""
    return [Repair(f"{targets}{ast.unparse(new)}", "", rank, ops=(OpEdit(site, step.op, run),))]


def samples_beside(facts: FailureFacts, x: Operand) -> str:
    """Another variable with as many rows as an input of one dimension has numbers, such as the targets; empty where there is none."""
    names = facts.caller.site.names if facts.caller is not None and x.is_input and len(x.sizes) == 1 else {}
    others = {name: value for name, value in names.items() if isinstance(value, torch.Tensor) and value is not x.tensor and value.dim()}
    alike = [name for name, value in others.items() if value.shape[0] == x.sizes[0] > _MANY and name.isidentifier()]
    return next((name for name in alike if name.startswith(("y", "target", "label"))), next(iter(alike), ""))


def _elements(call: ast.Call) -> list[ast.expr]:
    """The parts of the call that are its sizes."""
    first = call.args[0] if len(call.args) == 1 else None
    parts = first.elts if isinstance(first, (ast.Tuple, ast.List)) else call.args
    return [] if any(isinstance(part, ast.Starred) for part in parts) else parts


def _told(facts: FailureFacts, node: ast.expr, now: int, then: int, names: Sequence[str]) -> str:
    """Another dimension of the same input, where that has the wanted size, or the batch of one of these names; the number otherwise."""
    text = ast.unparse(node)
    for name, tensor in facts.inputs:
        for here in (dim for dim, size in enumerate(tensor.shape) if size == now):
            for there in (dim for dim, size in enumerate(tensor.shape) if size == then):
                for form in (f"{name}.size({{}})", f"{name}.shape[{{}}]"):
                    if text == form.format(here):
                        return form.format(there)
    batches = [(name, tensor.shape[0]) for name, tensor in facts.inputs if name in names and tensor.dim() > 1]
    return next((f"{name}.size(0)" for name, size in batches if size == then > 1 and isinstance(node, ast.Constant)), str(then))


def positions_in(made: Made | None) -> tuple[Made, int] | None:
    """The op that found the indices as positions in another tensor, such as ``argmax``, and in how many; None where there is none."""
    for step in itertools.takewhile(lambda step: step.op in _FINDS | _LAYS_OUT, steps(made)):
        sizes, result = step.inputs[0][0] if step.inputs else (), step.shape
        if step.op in _FINDS and sizes:
            along = [
                size
                for dim, size in enumerate(sizes)
                if result in {sizes[:dim] + kept + sizes[dim + 1 :] for kept in ((), result[dim : dim + 1])}
            ]
            return step, along[-1] if along else math.prod(sizes)
    return None


def beyond(values: torch.Tensor | None, size: int, *, low: int = 0) -> int | None:
    """The largest of these indices where it is too large, else the smallest where it is too small; None where all are there."""
    if values is None or not values.numel():
        return None
    smallest, largest = int(values.min()), int(values.max())
    return largest if largest >= size else smallest if smallest < low else None


def shortened(facts: FailureFacts, size: int, to: int, *, rank: int = 25) -> list[Repair]:
    """All sequences among the inputs that are `size` long, cut to the length that the model takes."""
    long = [name for name, tensor in facts.inputs if tensor.dim() >= 2 and tensor.shape[1] == size and not tensor.is_floating_point()]
    if not too_long(facts, size, to) or not 0 < to < size:
        return []
    cut = as_written(f"{{0}}[:, :{to}]")
    code = "\n".join(f"{name} = {cut.text(name)}" for name in long)
    return [Repair(code, f"as long as the model takes: {to}", rank, inputs=dict.fromkeys(long, cut), many=len(long))]


def too_long(facts: FailureFacts, size: int, to: int) -> str:
    """In words, where an input is a sequence of `size` and the model has `to` positions; empty where none is."""
    ids = [(name, tensor) for name, tensor in facts.inputs if tensor.dim() > 1 and tensor.dtype in _IDS]
    long = next((f"`{name}` is {shape(tuple(tensor.shape))}" for name, tensor in ids if tensor.shape[1] == size), "")
    if not long or not 0 < to < size:
        return ""
    settings = vars(getattr(facts.modules.get(""), "config", None) or object) if "" in facts.modules else {}
    named = next((name for name, value in settings.items() if value == to and ("position" in name or "ctx" in name)), "")
    return f"{long}, and the model has {to} positions{f' ({named})' if named else ''}"


def beside(facts: FailureFacts, cause: Diagnosis) -> Diagnosis:
    """Where a library's code failed: an input whose length is not that of the first, named and repaired."""
    if facts.op is None or len(facts.inputs) < 2 or (facts.site is not None and len(facts.operands) < 2):
        return cause
    name, first = facts.inputs[0]
    odd = [(key, tensor) for key, tensor in facts.inputs[1:] if tensor.dim() == first.dim() == 2 and tensor.shape != first.shape]
    if not odd or first.is_floating_point():
        return cause
    second_name, second = odd[0]
    met = [sizes for operand in facts.operands for sizes in (operand.sizes[:2], operand.sizes[-2:])]
    if facts.site is not None and not {tuple(first.shape), tuple(second.shape)} <= set(met):
        return cause  # the user's own code may want them so
    sentence = f"{cause.sentence}; `{second_name}` is {shape(tuple(second.shape))} beside `{name}` of {shape(tuple(first.shape))}"
    return replace(cause, sentence=sentence, edits=(*_alike(name, first, second_name, second), *cause.edits))


def _alike(name: str, first: torch.Tensor, key: str, second: torch.Tensor) -> list[Repair]:
    rows, length = first.shape
    if second.shape[0] == rows and second.shape[1] > length:
        cut = as_written(f"{{0}}[:, :{length}]")
        return [Repair(f"{key} = {cut.text(key)}", f"as long as `{name}`", 5, inputs={key: cut})]
    fill = "ones" if "mask" in key else "zeros" if "type" in key else ""
    if not fill:
        return []
    new, sizes = (torch.Tensor.new_ones if fill == "ones" else torch.Tensor.new_zeros), tuple(first.shape)
    filled = ValueChange(str, lambda tensor: new(tensor, sizes))
    return [Repair(f"{key} = torch.{fill}_like({name})", f"as large as `{name}`", 6, inputs={key: filled})]


def fitted(facts: FailureFacts, table: Operand, got: int, wanted: int, *, rank: int) -> list[Repair]:
    """The module that holds the table, made with the number that makes it as long, or as wide, as is wanted."""
    if of_inputs(table.made) or not got or not wanted or isinstance(table.tensor, torch.nn.Parameter):
        return []
    holders = [table.name.rpartition(".")[0]] if table.owned else dict.fromkeys(step.module for step in steps(table.made))
    return [edit for path in holders for edit in _remade(facts, path, got, wanted, rank=rank)]


def _remade(facts: FailureFacts, path: str, got: int, wanted: int, *, rank: int) -> list[Repair]:
    """A module with another number, so that what is `got` large is as large as `wanted`; its parameters stay as large as they are."""
    module = facts.modules.get(path)
    numbers = called_with(module) if module is not None and _sizes(module.buffers()) else None
    if module is None or numbers is None:
        return []
    kind, edits = type(module), []
    # The same number in all of its kind, such as in each block, is one mistake.
    parts = facts.modules.get("", module).named_modules()
    alike = [name for name, part in parts if type(part) is kind and _sizes(part.buffers()) == _sizes(module.buffers())]
    for name, value in numbers.items():
        new, rest = divmod(value * wanted, got) if type(value) is int else (0, 1)
        changed = {**numbers, name: new}
        make = functools.partial(made_like, kind, changed)
        made = quietly(functools.partial(make, module)) if not rest and new not in {0, value} else None
        if made is not None and _sizes(made.parameters()) == _sizes(module.parameters()):
            code = "\n".join(f"{as_typed(place)} = {typed(kind, changed)}" for place in alike)
            why = f"{name} of {new} instead of {value}"
            edits.append(Repair(code, why, rank + 2 * (value != got), modules=dict.fromkeys(alike, make)))
    return edits


def _sizes(tensors: Iterable[torch.Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


def norm(facts: FailureFacts) -> Diagnosis | None:
    """A batch norm in training needs more than one value for each channel."""
    if "more than 1 value" not in facts.text or not facts.operands:
        return None
    x = facts.operands[0]
    sentence = f"{facts.who} normalizes over the batch and needs 2 values per channel in training, gets {shape(x.sizes)}"
    return Diagnosis(sentence, tuple(left_out(facts) or _evaluated(facts)), x)


def _evaluated(facts: FailureFacts) -> list[Repair]:
    norms = [path for path, module in facts.modules.items() if isinstance(module, nn.modules.batchnorm._NormBase)]
    if "" in norms or facts.path is None:
        return []
    modules = dict.fromkeys([*norms, facts.path], lambda old: copy.copy(old).eval())
    return [Repair("model.eval()", "for inference; or use a larger batch", 10, modules=modules)]


def left_out(facts: FailureFacts) -> list[Repair]:
    """The edit that leaves a last batch of one row out; it is tried with a batch of two.

    None where the model is not called in a loop over a loader that ends with such a batch.
    """
    for name, loader in _loaders(facts.caller.site) if facts.caller is not None else ():
        size = loader.batch_size or 0
        try:
            rows = len(loader.sampler)  # type: ignore[arg-type]  # not every sampler has a length
        except (TypeError, NotImplementedError):
            continue
        if size > 1 and not loader.drop_last and rows % size == 1:
            ones = [key for key, tensor in facts.inputs if tensor.dim() and tensor.shape[0] == 1]
            twice = ValueChange(lambda x: x, lambda tensor: torch.cat([tensor, tensor]))
            why = f"{rows} rows in batches of {size} leave a last one of a single row"
            return [Repair(f"{name} = DataLoader(..., batch_size={size}, drop_last=True)", why, 5, inputs=dict.fromkeys(ones, twice))]
    return []


def _loaders(site: EditSite) -> Iterator[tuple[str, DataLoader[Any]]]:
    """The loaders that the loops around a line go through, by name."""
    loops = (loop for loop in enclosing(tree_of(site.code.co_filename), site.line) if isinstance(loop, ast.For))
    for part in nodes(ast.Name, *(loop.iter for loop in loops)):
        if isinstance(loader := site.names.get(part.id), DataLoader):
            yield part.id, loader
