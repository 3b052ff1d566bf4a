"""Layers that refuse what they get: embeddings an index, batch norms a single row."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Repair, ValueChange, as_written, method, on_operand
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.inputs_and_indices import beyond, positions_in, shortened, too_long
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, named, producer_edits, short_dtype
from torchdebug_magics.instruments.shapes.repair.size_history import came_from, maker, steps
from torchdebug_magics.instruments.shapes.repair.source import EditSite
from torchdebug_magics.probing.source.syntax import enclosing, nodes, tree_of

_ROUNDS = frozenset(["floor", "round", "ceil", "trunc", "long", "int", "to"])


def embedding(facts: FailureFacts) -> Diagnosis | None:
    """``emb`` has 10 rows (0 to 9), gets index 10."""
    if facts.op not in {"embedding", "embedding_bag"}:
        return None
    ids, table = facts.operands[0], facts.operands[1]
    if facts.op == "embedding_bag" and not table.owned and ids.owned:
        ids, table = table, ids
    if ids.tensor.dtype not in {torch.int64, torch.int32}:
        at = facts.operands.index(ids)
        sentence = f"{facts.who} expects integer indices, and {named(ids)} is {short_dtype(ids)}"
        return Diagnosis(sentence, tuple(on_operand(facts, at, method("long"), rank=1, why="indices are int64")), ids)
    values, rows = facts.values(ids.tensor), table.sizes[0]
    wrong = beyond(values, rows)
    return None if values is None or wrong is None else _beyond(facts, ids, values, rows, wrong)


def _beyond(facts: FailureFacts, ids: Operand, values: torch.Tensor, rows: int, wrong: int) -> Diagnosis:
    low, high = int(values.min()), int(values.max())
    place = [int(index) for index in (values == wrong).nonzero()[0]]
    where = f" at {f'`{ids.name}`' if ids.name else ''}{place}" if place else ""
    sentence = f"{facts.who} has {rows} rows (0 to {rows - 1}), gets index {wrong}{where}"
    positions = positions_in(ids.made)
    if positions is not None and positions[1] > rows:
        sentence += f": `{positions[0].op}` returns one of {positions[1]} {came_from(positions[0].inputs[0][1])}".rstrip()
    edits = _embedding_edits(facts, ids, (low, high), rows)
    if maker(ids.made) is not None and not ids.is_input and low == 0:  # positions, counted along a sequence
        long = too_long(facts, high + 1, rows)
        sentence += f": {long}" if long else ""
        edits += shortened(facts, high + 1, rows, rank=25 if facts.site is not None else 10)
    return Diagnosis(sentence, tuple(edits), ids)


def _embedding_edits(facts: FailureFacts, ids: Operand, ends: tuple[int, int], rows: int) -> list[Repair]:
    low, high = ends
    if low < 0 or not isinstance(facts.module, (nn.Embedding, nn.EmbeddingBag)):
        return []
    positions = positions_in(ids.made)
    last = high if positions is None else max(high, positions[1] - 1)
    edits = rebuilt_module(facts.module, facts.path, num_embeddings=last + 1, why=f"rows for the indices 0 to {last}")
    if positions is not None:
        edits += producer_edits(facts, replace(ids, made=positions[0].inputs[0][1]), positions[1], rows, rank=22)
    elif high == rows and any(step.op in _ROUNDS for step in steps(ids.made)):  # such as bins of which the last one has one number
        edits += on_operand(facts, 0, as_written(f"{{0}}.clamp(max={rows - 1})"), rank=8, why="no index beyond the last row")
    if low and high == rows:
        edits += on_operand(facts, 0, as_written("{0} - 1"), rank=30, why="indices starting at 0")
    return edits


def norm(facts: FailureFacts) -> Diagnosis | None:
    """A batch norm in training needs more than one value for each channel."""
    if "more than 1 value" not in facts.text or not facts.operands:
        return None
    x = facts.operands[0]
    sentence = f"{facts.who} normalizes over the batch and needs 2 values per channel in training, gets {shape(x.sizes)}"
    return Diagnosis(sentence, tuple(left_out(facts) or _evaluated(facts)), x)


def _evaluated(facts: FailureFacts) -> list[Repair]:
    parts = {path: _in_evaluation for path, module in facts.modules.items() if isinstance(module, nn.modules.batchnorm._NormBase)}
    if "" in parts or facts.path is None:
        return []
    parts[facts.path] = _in_evaluation
    return [Repair("model.eval()", "for inference; or use a larger batch", 10, modules=parts)]


def _in_evaluation(old: nn.Module) -> nn.Module:
    module = copy.copy(old)
    module.__dict__ = dict(old.__dict__)
    return module.eval()


def left_out(facts: FailureFacts) -> list[Repair]:
    """The edit that leaves a last batch of one row out; it is tried with a batch of two.

    None where the model is not called in a loop over a loader that ends with such a batch.
    """
    for name, loader in _loaders(facts.caller.site) if facts.caller is not None else ():
        if (sizes := _sizes(loader)) is not None:
            ones = [key for key, tensor in facts.inputs if tensor.dim() and tensor.shape[0] == 1]
            twice = ValueChange(lambda x: x, lambda tensor: torch.cat([tensor, tensor]))
            why = "{} rows in batches of {} leave a last one of a single row".format(*sizes)
            return [Repair(f"{name} = DataLoader(..., batch_size={sizes[1]}, drop_last=True)", why, 5, inputs=dict.fromkeys(ones, twice))]
    return []


def _loaders(site: EditSite) -> Iterator[tuple[str, DataLoader[Any]]]:
    """The loaders that the loops around a line go through, by name."""
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
