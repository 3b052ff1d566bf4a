"""Writes reports to the terminal and to files."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchdebug_magics.html import markup, plain
from torchdebug_magics.ranks.report import RanksReport

if TYPE_CHECKING:
    from pathlib import Path

    from torchdebug_magics.instrument import Instrument
    from torchdebug_magics.report import Report

__all__ = ["Outputs"]

_RANK = "{rank}"


class Outputs:
    """The outputs of one run. A file with ``{rank}`` in its name is written by every rank, any other once."""

    def __init__(self, row: Instrument, json: Path | None, html: Path | None) -> None:
        self._row = row
        self._files = [path.absolute() for path in (json, html) if path is not None]  # the script may go to another folder
        self._html = None if html is None else html.absolute()

    def own(self, report: Report, rank: int) -> None:
        """Write the files of this process or, if it launched ranks, of each rank."""
        reports = {one.rank: one.report for one in report.ranks} if isinstance(report, RanksReport) else {rank: report}
        for path in self._files:
            for number, one in reports.items():
                if _RANK in path.name and one is not None:
                    self._write(path, path.with_name(path.name.replace(_RANK, str(number))), one)

    def of_all(self, report: Report) -> None:
        """On the terminal, too; last, so that it is what one sees."""
        for path in self._files:
            if _RANK not in path.name:
                self._write(path, path, report)
        try:
            text = plain.render(self._row.page(report))
        except Exception as failure:  # noqa: BLE001 - a view that fails costs its picture, never the run
            text = f"{report.verdict}\n({self._row.name} could not show its report: {type(failure).__name__}: {failure})"
        print(f"\n{text}", file=sys.stderr, flush=True)  # noqa: T201 - a terminal is the screen

    def say(self, text: str) -> None:
        """One line on the terminal."""
        print(f"{self._row.name}: {text}", file=sys.stderr, flush=True)  # noqa: T201 - as above

    def _write(self, asked: Path, path: Path, report: Report) -> None:
        try:
            path.write_text(f"{self._page(report) if asked == self._html else report.to_json()}\n", encoding="utf-8")
        except OSError as error:
            self.say(f"the report could not be written to {path}: {error.strerror}")

    def _page(self, report: Report) -> str:
        head = f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{self._row.name}</title></head>\n<body>'
        return f"{head}\n{markup.render(self._row.page(report))}\n</body>\n</html>"
