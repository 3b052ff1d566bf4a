"""The totals of a shapes report, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, count
from torchdebug_magics.instruments.shapes.table.columns import full_name
from torchdebug_magics.instruments.shapes.table.outline import walk

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.report import ShapesReport
    from torchdebug_magics.instruments.shapes.table.outline import Node

__all__ = ["legend", "totals_of"]

_HOW = {
    "fake": "the forward ran on tensors without data: nothing was computed, the model is unchanged",
    "meta": "the weights are on `meta` and have no data: nothing was computed",
    "real": "the forward ran on real tensors",
    "params": "the forward was not run",
}
_SHARED = "; ops on DTensors are counted once for all ranks"


def totals_of(report: ShapesReport) -> list[tuple[str, str]]:
    """Parameters, FLOPs, activations, and how they were found; a name and a text each."""
    frozen = report.total_params - report.trainable_params
    trained = f"{report.trainable_params:,} trainable, {frozen:,} frozen" if frozen else "all trainable" if report.total_params else ""
    found = [("parameters", ", ".join(filter(None, (f"{report.total_params:,} ({report.size})", trained))))]
    if report.buffer_count:
        found.append(("buffers", f"{report.buffer_count:,} ({byte_size(report.buffer_bytes)})"))
    if report.mode != "params":
        until = " up to the failure" if report.failure else " in one forward"
        found.append(("FLOPs", f"{count(report.total_flops)}{until}; 2 per multiply-add{_SHARED if report.has_shared_flops else ''}"))
        found.append(("activations", f"{byte_size(report.activation_bytes)} saved for the backward pass{until if report.failure else ''}"))
    if any(row.formula for row in report.rows):
        fixed = f"{report.symbols}; other letters" if report.symbols else "letters"
        found.append(("symbols", f"{fixed} are sizes of the input, such as `B` for the batch size"))
    if report.unused:
        found.append(("never called", f"{', '.join(f'`{path}`' for path in report.unused)}: the forward does not use their parameters"))
    return [*found, ("method", f"{_HOW[report.mode]}{_unchecked(report.unchecked_ops)}{_checked(report.checked_ops)}")]


def _unchecked(ops: Sequence[str]) -> str:
    return f"; {', '.join(f'`{op}`' for op in ops)} may reject values, which only `--real` checks" if ops else ""


def _checked(ops: Sequence[str]) -> str:
    return f"; then once on real tensors, as {', '.join(f'`{op}`' for op in ops)} may reject values" if ops else ""


def legend(report: ShapesReport, nodes: Sequence[Node]) -> str:
    """Say which modules and calls a number of the table stands for."""
    columns = "params include" if report.mode == "params" else "params, FLOPs and activations include"
    text = f"{columns} all submodules"
    folded = next((node for node, _ in walk(nodes) if len(node.rows) > 1), None)
    if folded is None or report.layout.sort:
        return text
    return f"{text}; `{full_name(folded)}` stands for {len(folded.rows):,} equal calls, with the numbers of one"
