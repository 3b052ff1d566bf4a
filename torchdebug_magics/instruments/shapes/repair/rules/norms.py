"""Batch norms of a single row."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit
from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis
from torchdebug_magics.instruments.shapes.repair.source import Site
from torchdebug_magics.probing.source.syntax import enclosing, nodes, tree_of


def norm(facts: Facts) -> Diagnosis | None:
    """A batch norm in training needs more than one value for each channel."""
    if "more than 1 value" not in facts.text or not facts.operands:
        return None
    x = facts.operands[0]
    sentence = f"{facts.who} normalizes over the batch and needs 2 values per channel in training, gets {shape(x.sizes)}"
    return Diagnosis(sentence, tuple(left_out(facts) or _evaluated(facts)), x)


def _evaluated(facts: Facts) -> list[Edit]:
    parts = {path: _in_evaluation for path, one in facts.modules.items() if isinstance(one, nn.modules.batchnorm._NormBase)}
    if "" in parts or facts.path is None:
        return []
    parts[facts.path] = _in_evaluation
    return [Edit("model.eval()", "for inference; or use a larger batch", 10, modules=parts)]


def _in_evaluation(old: nn.Module) -> nn.Module:
    one = copy.copy(old)
    one.__dict__ = dict(old.__dict__)
    return one.eval()


def left_out(facts: Facts) -> list[Edit]:
    """The edit that leaves a last batch of one row out; it is tried with a batch of two.

    None where the model is not called in a loop over a loader that ends with such a batch.
    """
    for name, loader in _loaders(facts.caller.site) if facts.caller is not None else ():
        if (sizes := _sizes(loader)) is not None:
            ones = [one for one, tensor in facts.inputs if tensor.dim() and tensor.shape[0] == 1]
            twice = Change(lambda x: x, lambda tensor: torch.cat([tensor, tensor]))
            why = "{} rows in batches of {} leave a last one of a single row".format(*sizes)
            return [Edit(f"{name} = DataLoader(..., batch_size={sizes[1]}, drop_last=True)", why, 5, inputs=dict.fromkeys(ones, twice))]
    return []


def _loaders(site: Site) -> Iterator[tuple[str, DataLoader[Any]]]:
    """Those that the loops around a line go through, by name."""
    loops = (loop for loop in enclosing(tree_of(site.code.co_filename), site.line) if isinstance(loop, ast.For))
    for part in nodes(ast.Name, *(loop.iter for loop in loops)):
        if isinstance(loader := site.names.get(part.id), DataLoader):
            yield part.id, loader


def _sizes(loader: DataLoader[Any]) -> tuple[int, int] | None:
    size = loader.batch_size
    try:
        rows = len(loader.sampler)  # type: ignore[arg-type]  # not every sampler has a length
    except (TypeError, NotImplementedError):
        return None
    return (rows, size) if size is not None and size > 1 and not loader.drop_last and rows % size == 1 else None
