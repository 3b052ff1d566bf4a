"""What stands below the table of a shapes report: the sums, in words."""

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
    "fake": "nothing was computed: the forward ran on tensors without data, and the model is as it was",
    "meta": "nothing was computed: the weights are on `meta` and hold no data",
    "real": "the forward ran for real",
    "params": "the forward was not run",
}
_SHARED = "; what ranks compute together, on DTensors, is counted once, for all of them"


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
        found.append(("activations", f"{byte_size(report.activation_bytes)} kept for the backward pass{until if report.failure else ''}"))
    if any(row.formula for row in report.rows):
        fixed = f"{report.symbols}; the others" if report.symbols else "they"
        found.append(("letters", f"{fixed} are sizes of the input, such as `B` for the batch"))
    if report.unused:
        found.append(("never called", f"{', '.join(f'`{path}`' for path in report.unused)}: the forward does not use what they hold"))
    return [*found, ("how", f"{_HOW[report.mode]}{_unchecked(report.unchecked_ops)}{_checked(report.checked_ops)}")]


def _unchecked(ops: Sequence[str]) -> str:
    return f"; whether {', '.join(f'`{op}`' for op in ops)} would refuse a value was not checked, which `--real` does" if ops else ""


def _checked(ops: Sequence[str]) -> str:
    return f"; once more for real, to see whether {', '.join(f'`{op}`' for op in ops)} would refuse a value" if ops else ""


def legend(report: ShapesReport, nodes: Sequence[Node]) -> str:
    """Of what the numbers in the table are."""
    said = f"{'params are' if report.mode == 'params' else 'params, FLOPs and activations are'} of a module and all inside it"
    alike = next((node for node, _ in walk(nodes) if len(node.rows) > 1), None)
    if alike is None or report.layout.sort:
        return said
    many = f"{len(alike.rows):,}"
    return (
        f"{said}; `{full_name(alike)}` stands for {many} calls that do the same, and its numbers, also those inside it, are of all {many}"
    )
