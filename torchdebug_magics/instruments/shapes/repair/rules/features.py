"""Embeddings: indices beyond the table, and of another dtype."""

from __future__ import annotations

import torch
from torch import nn

from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.inputs_and_indices import beyond, counted, is_rounded, shortened, too_long
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, named, producer_edits, short_dtype
from torchdebug_magics.instruments.shapes.repair.size_history import maker

_IMAGES = 4


def embedding(facts: Facts) -> Diagnosis | None:
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


def _beyond(facts: Facts, ids: Operand, values: torch.Tensor, rows: int, wrong: int) -> Diagnosis:
    low, high = int(values.min()), int(values.max())
    place = [int(one) for one in (values == wrong).nonzero()[0]]
    where = f" at {f'`{ids.name}`' if ids.name else ''}{place}" if place else ""
    sentence = f"{facts.who} has {rows} rows (0 to {rows - 1}), gets index {wrong}{where}"
    found = counted(ids.made)
    if found is not None and found.many > rows:
        sentence += f": `{found.op}` returns one of {found.many}{f' {found.source}' if found.source else ''}"
    edits = _embedding_edits(facts, ids, (low, high), rows) if low >= 0 else []
    if maker(ids.made) is not None and not ids.is_input and low == 0:  # positions, counted along a sequence
        long = too_long(facts, high + 1, rows)
        sentence += f": {long}" if long else ""
        edits += shortened(facts, high + 1, rows, rank=25 if facts.site is not None else 10)
    return Diagnosis(sentence, tuple(edits), ids)


def _embedding_edits(facts: Facts, ids: Operand, ends: tuple[int, int], rows: int) -> list[Edit]:
    if not isinstance(facts.module, (nn.Embedding, nn.EmbeddingBag)):
        return []
    low, high = ends
    found = counted(ids.made)
    last = max(high, found.many - 1) if found is not None else high
    edits = rebuilt_module(facts.module, facts.path, num_embeddings=last + 1, why=f"rows for the indices 0 to {last}")
    if found is not None and found.before is not None:
        looked_through = Operand(ids.tensor, "", owned=False, made=found.before)
        edits += producer_edits(facts, looked_through, found.many, rows, rank=22)
    if high != rows:
        return edits
    if found is None and is_rounded(ids.made):
        change = Change(f"{{}}.clamp(max={rows - 1})".format, lambda one: one.clamp(max=rows - 1))
        edits += on_operand(facts, 0, change, rank=8, why="no index beyond the last row")
    if low >= 1:
        edits += on_operand(facts, 0, Change(lambda x: f"{x} - 1", lambda one: one - 1), rank=30, why="indices starting at 0")
    return edits
