"""Why a birth came about: the first rule that fits, each with the sentence that explains it and the line that repairs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import number
from torchdebug_magics.instruments.nanhunt.causes.domain_causes import DOMAIN_CAUSES
from torchdebug_magics.instruments.nanhunt.causes.neighbour_causes import NEIGHBOUR_CAUSES, masked_row, where_trap
from torchdebug_magics.instruments.nanhunt.causes.operand_causes import OPERAND_CAUSES, Diagnosis, Rule
from torchdebug_magics.instruments.nanhunt.causes.range_causes import RANGE_CAUSES, out_of_range
from torchdebug_magics.instruments.nanhunt.causes.tensor_names import UNNAMED, owner_of, shares_memory, variable_name
from torchdebug_magics.instruments.nanhunt.causes.written_constants import infinite_constant, nan_constant
from torchdebug_magics.probing.tensors import NAN, tensors_in

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.causes.evidence import Evidence

__all__ = ["Diagnosis", "diagnose"]


def diagnose(evidence: Evidence) -> Diagnosis:
    """The first rule that fits; without one, what the op did."""
    rules = _LEAF if evidence.op is None else _BACKWARD if evidence.op.backward or evidence.in_gradient else _FORWARD
    for rule in rules:
        found = rule(evidence)
        if found is not None:
            return found
    return _plain(evidence)


def _bad_row(evidence: Evidence) -> Diagnosis | None:
    rows, columns = evidence.rows, evidence.columns
    if columns:
        which = f"column {columns[0]}" if len(columns) == 1 else f"columns {', '.join(map(str, columns))}"
        return Diagnosis(
            "bad_data_row",
            f"the data contain {'NaN' if evidence.kind == NAN else 'inf'} in {which} of every row; the model only propagates it",
            f"drop or repair {which}: dividing a constant column by its standard deviation, for example, gives NaN",
        )
    which = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows" if rows else "the tensor"
    kind = "NaN" if evidence.kind == NAN else "inf"
    taker = "model" if _is_given_to_a_model(evidence) else "loss"
    return Diagnosis(
        "bad_data_row",
        f"the data contain {kind} in {which}; the {taker} only propagates it",
        f"drop or repair {which} before the {taker} sees it" + _good_rows(evidence, rows),
    )


def _is_given_to_a_model(evidence: Evidence) -> bool:
    given = (tensor for entry in evidence.context.entries for tensor in tensors_in((entry.args, entry.kwargs)))
    return any(shares_memory(tensor, evidence.birth.tensor) for tensor in given)


def _good_rows(evidence: Evidence, rows: tuple[int, ...]) -> str:
    """Code for the good rows, where there are any."""
    tensor, context = evidence.birth.tensor, evidence.context
    name = variable_name(tensor, context.variables, ())
    if not tensor.dim() or not 0 < len(rows) < len(tensor) or name == UNNAMED:
        return ""
    flat = ".flatten(1).all(1)" if tensor.dim() > 1 else ""
    return f": `{name}[torch.isfinite({name}){flat}]` keeps the good rows"


def _bad_embedding(evidence: Evidence) -> Diagnosis | None:
    if not evidence.birth.via or not _is_lookup(evidence, evidence.birth.via[0].name):
        return None
    rows = evidence.rows
    return Diagnosis(
        "bad_embedding_row",
        f"the embedding has a non-finite row ({', '.join(map(str, rows[:5]))}), and this batch looks it up",
        "reinitialize that row, and find what wrote to it: an update with a non-finite gradient, or a corrupted checkpoint",
    )


def _is_lookup(evidence: Evidence, name: str) -> bool:
    """Whether rows of a table were taken. An index takes rows of data, too: there only a parameter is a table."""
    if name in {"embedding", "_embedding_bag"}:
        return True
    owner = owner_of(evidence.birth.tensor, evidence.context.roots)
    return name in {"index_select", "index"} and owner is not None and owner[0] == "parameter"


def _plain(evidence: Evidence) -> Diagnosis:
    values = ", ".join(value if isinstance(value, str) else number(value) for value in evidence.operands()[:3])
    kind = "NaN" if evidence.kind == NAN else "inf"
    name = f"`{evidence.name}`" if evidence.name else "it"
    what = f"the derivative of {name}" if evidence.op is not None and evidence.op.backward else name
    if evidence.op is None:
        return Diagnosis(None, f"it contained {kind} before the step began", "find the code that wrote to it")
    return Diagnosis(
        None,
        f"{what} returned {kind} for finite inputs" + (f" ({values})" if values else ""),
        f"check the inputs of `{evidence.name}` on this line",
    )


_LEAF: tuple[Rule, ...] = (_bad_embedding, _bad_row)
_FORWARD: tuple[Rule, ...] = (
    nan_constant, infinite_constant, *NEIGHBOUR_CAUSES, *RANGE_CAUSES, *OPERAND_CAUSES, *DOMAIN_CAUSES, out_of_range,
)  # fmt: skip
_BACKWARD: tuple[Rule, ...] = (nan_constant, masked_row, where_trap, *_FORWARD[1:])
