"""Four magics over healthy cells of every kind: no alarm, no crash, and the results of a plain run, bit for bit."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from IPython.utils.capture import capture_output

from tests.doors import in_process_shell
from tests.reports.answers import ANSWERS
from tests.unit.healthy_cells import CELLS
from torchdebug_magics import catalog

if TYPE_CHECKING:
    from pathlib import Path

LINES = {
    "nanhunt": "%%nanhunt -o r",
    "memtrace": "%%memtrace -o r",
    "shapes": "%%shapes -o r",
    "deterministic": "%%deterministic --verify -o r",
}

_TOLD = re.compile(r"was called \d+ times|in `torch\.func` is not counted")
"""What a report says of how it was made."""


def run(line: str, cell: str) -> tuple[list[torch.Tensor], torch.Tensor, Any]:
    """(what it leaves in `out`, the state of torch's generator after it, the report)."""
    with in_process_shell() as shell, capture_output() as captured:
        result = shell.run_cell(f"{line}\n{cell}".lstrip("\n"), store_history=True)
        assert result.success, captured.stdout + captured.stderr
        return [tensor.detach().clone() for tensor in shell.user_ns["out"]], torch.get_rng_state(), shell.user_ns.get("r")


@pytest.mark.parametrize("name", CELLS)
def test_nothing_is_found_and_nothing_is_changed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain, drawn, _ = run("", CELLS[name])
    for magic, line in LINES.items():
        out, generator, report = run(line, CELLS[name])
        answer = ANSWERS[magic](report)
        assert not answer.found, f"{magic}: {report.verdict}\n{answer.fix}"
        unsaid = [problem for problem in report.problems if not _TOLD.search(problem)]
        assert not unsaid, f"{magic}: {unsaid}"
        assert catalog.instrument(magic).page(report).status in {"good", "info"}, f"{magic}: {report.verdict}"
        assert len(out) == len(plain), magic
        assert all(torch.equal(one, other) for one, other in zip(out, plain, strict=True)), f"{magic} changes the results"
        assert torch.equal(generator, drawn), f"{magic} draws from the generator"
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - names say enough
