"""The last batch of a loader, which is smaller than all others."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit
from torchdebug_magics.instruments.shapes.repair.source import tree_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts
    from torchdebug_magics.instruments.shapes.repair.source import Site

__all__ = ["left_out"]


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
    tree = tree_of("".join(linecache.getlines(site.code.co_filename)))
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.For) and node.lineno <= site.line <= (node.end_lineno or node.lineno):
            for part in ast.walk(node.iter):
                if isinstance(part, ast.Name) and isinstance(loader := site.names.get(part.id), DataLoader):
                    yield part.id, loader


def _sizes(loader: DataLoader[Any]) -> tuple[int, int] | None:
    size = loader.batch_size
    try:
        rows = len(loader.sampler)  # type: ignore[arg-type]  # not every sampler has a length
    except (TypeError, NotImplementedError):
        return None
    return (rows, size) if size is not None and size > 1 and not loader.drop_last and rows % size == 1 else None
