"""Why a birth came about: the first rule that fits, each with the sentence that explains it and the line that repairs it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from torchdebug_magics.format import number
from torchdebug_magics.instruments.nanhunt.causes import OPERAND_CAUSES, Diagnosis, Rule, infinite_constant, nan_constant
from torchdebug_magics.instruments.nanhunt.domain_causes import DOMAIN_CAUSES
from torchdebug_magics.instruments.nanhunt.naming import owner_of
from torchdebug_magics.instruments.nanhunt.neighbour_causes import NEIGHBOUR_CAUSES, where_trap
from torchdebug_magics.instruments.nanhunt.range_causes import RANGE_CAUSES, out_of_range
from torchdebug_magics.probing.tensors import NAN

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.evidence import Evidence

__all__ = ["Diagnosis", "diagnose"]


_SMALL: Final = re.compile(r"1e-(6|8|12)")


def diagnose(evidence: Evidence) -> Diagnosis:
    """The first rule that fits; without one, what the op did."""
    rules = _LEAF if evidence.op is None else _BACKWARD if evidence.op.backward or evidence.in_gradient else _FORWARD
    for rule in rules:
        found = rule(evidence)
        if found is not None:
            return replace(found, fix=found.fix + _room(evidence, found))
    return _plain(evidence)


def _room(evidence: Evidence, found: Diagnosis) -> str:
    """What a small number in a fix needs to be one."""
    small = evidence.birth.tensor.dtype is torch.float16 and _SMALL.search(found.fix) is not None
    return " (call `.float()` first: in float16 so small a number is 0, or 1 away from it makes no difference)" if small else ""


def _bad_row(evidence: Evidence) -> Diagnosis | None:
    rows, columns = evidence.rows, evidence.columns
    if columns:
        which = f"column {columns[0]}" if len(columns) == 1 else f"columns {', '.join(map(str, columns))}"
        return Diagnosis(
            "bad_data_row",
            f"the data hold {'NaN' if evidence.kind == NAN else 'an infinity'} in {which} of every row; the model only passed it on",
            f"drop or repair {which}: one that never varies, say, becomes NaN when it is divided by its standard deviation",
        )
    which = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows" if rows else "the tensor"
    kind = "NaN" if evidence.kind == NAN else "an infinity"
    return Diagnosis(
        "bad_data_row",
        f"the data hold {kind} in {which}; the model only passed it on",
        f"drop or repair {which} before the model sees it, for example with `torch.isfinite(...).all(1)`",
    )


def _bad_embedding(evidence: Evidence) -> Diagnosis | None:
    if not evidence.birth.via or not _is_lookup(evidence, evidence.birth.via[0].name):
        return None
    rows = evidence.rows
    return Diagnosis(
        "bad_embedding_row",
        f"the embedding holds a bad row ({', '.join(map(str, rows[:5]))}), and this batch looked it up",
        "reinitialise that row, and look at what wrote it: an update with a bad gradient, or a broken checkpoint",
    )


def _is_lookup(evidence: Evidence, name: str) -> bool:
    """Whether rows of a table were taken. An index takes rows of data, too: there only a parameter is a table."""
    if name in {"embedding", "_embedding_bag"}:
        return True
    owner = owner_of(evidence.birth.tensor, evidence.context.roots)
    return name in {"index_select", "index"} and owner is not None and owner[0] == "parameter"


def _plain(evidence: Evidence) -> Diagnosis:
    values = ", ".join(value if isinstance(value, str) else number(value) for value in evidence.operands()[:3])
    kind = "NaN" if evidence.kind == NAN else "an infinity"
    name = f"`{evidence.name}`" if evidence.name else "it"
    what = f"the derivative of {name}" if evidence.op is not None and evidence.op.backward else name
    if evidence.op is None:
        return Diagnosis(None, f"it held {kind} before the step began", "find out what wrote it")
    return Diagnosis(
        None, f"{what} made {kind} of finite numbers" + (f" ({values})" if values else ""), f"look at what enters `{evidence.name}` here"
    )


_LEAF: tuple[Rule, ...] = (_bad_embedding, _bad_row)
_FORWARD: tuple[Rule, ...] = (
    nan_constant, infinite_constant, *NEIGHBOUR_CAUSES, *RANGE_CAUSES, *OPERAND_CAUSES, *DOMAIN_CAUSES, out_of_range,
)  # fmt: skip
_BACKWARD: tuple[Rule, ...] = (nan_constant, where_trap, *_FORWARD[1:])
