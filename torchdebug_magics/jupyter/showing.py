"""A session that shows itself: live while its cell runs, as a report at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchdebug_magics.errors import SessionError
from torchdebug_magics.jupyter.live import LiveView

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from torchdebug_magics.instrument import Instrument
    from torchdebug_magics.jupyter.arguments import Arguments
    from torchdebug_magics.jupyter.display import Screen
    from torchdebug_magics.jupyter.recorder import Recorder
    from torchdebug_magics.report import Report
    from torchdebug_magics.session import Session

__all__ = ["Delivery", "ShownSession", "watched_work"]


class Delivery:
    """What becomes of a report: kept under a name, written to a file, shown."""

    def __init__(self, row: Instrument, asked: Arguments, screen: Screen, keep: Callable[[str, Report], None]) -> None:
        self.row = row
        self.asked = asked
        self.screen = screen
        self._keep = keep

    def __call__(self, report: Report, *, is_shown: bool = True) -> None:
        """Keep first, show last, so that a failure to show loses nothing."""
        if self.asked.output:
            self.screen.shell.user_ns[self.asked.output] = report
        self._keep(self.row.name, report)
        if self.asked.json:
            self._write(self.asked.json, report)
        if is_shown and not self.asked.quiet:
            self.screen.show(report, self.row, widget=self.asked.widget)

    def _write(self, path: Path, report: Report) -> None:
        try:
            path.write_text(report.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            self.screen.say(f"the report could not be written to {path}: {error}")


@contextmanager
def watched_work(row: Instrument, screen: Screen, *, is_quiet: bool) -> Iterator[Callable[[object], None]]:
    """What takes the snapshots of long work; the latest is seen while it goes on."""
    latest: list[object] = []
    drawn: list[tuple[object, tuple[str, str]]] = []

    def draw() -> tuple[str, str] | None:
        if not latest:
            return None
        snapshot = latest[0]
        if not drawn or drawn[0][0] is not snapshot:
            drawn[:] = [(snapshot, screen.draw(row.live_page(snapshot)))]
        return drawn[0][1]

    def take(snapshot: object) -> None:
        latest[:] = [snapshot]

    view = LiveView(draw, screen)
    if row.tells and row.live_view and not is_quiet:
        view.start()
    try:
        yield take
    finally:
        view.stop()


class ShownSession:
    """Owned by a cell, or lasting; may be left twice, as the second time finishes what an interrupt cut short."""

    def __init__(self, session: Session[Any], deliver: Delivery, recorder: Recorder, *, lasting: bool = False) -> None:
        self._session = session
        self._deliver = deliver
        self._recorder = recorder
        self._live = LiveView(self._draw, deliver.screen, lasting=lasting)
        self._drawn: tuple[object, tuple[str, str]] = (None, ("", ""))
        screen, row = deliver.screen, deliver.row
        self._engine = row.engine_cell(screen.cell_source()) if screen.is_engine and row.over_ranks and not lasting else None
        self._after_last_cell: object | None = None
        self._delivered = False

    def __enter__(self) -> Self:
        self._session.__enter__()
        if self._deliver.row.black_box:
            self._recorder.start(self)
        if self._engine is not None:
            self._engine.begin()
        is_seen = not (self._deliver.asked.quiet or (self._engine is not None and self._engine.is_told_elsewhere))
        if is_seen and self._deliver.row.live_view:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._session.__exit__(kind, error, trace)
        finally:
            self._recorder.stop(self)
            self._live.stop()
            if not self._delivered and (report := self._report()) is not None:
                is_shown = True
                if self._engine is not None:
                    report, is_shown = self._engine.merged(report, error), not self._engine.is_told_elsewhere
                self._deliver(report, is_shown=is_shown)
                self._delivered = True

    def live(self) -> object | None:
        """The probe's snapshot."""
        return self._session.live()

    def standing(self) -> str:
        """See `Session`."""
        return self._session.standing()

    def traceback_of(self, error: BaseException) -> list[str]:
        """See `Session`."""
        return self._session.traceback_of(error)

    def after_cell(self) -> None:
        """Of a lasting session: show what it has to say about the cell that has ended."""
        snapshot = self._session.live() if self._deliver.row.after_cell and not self._deliver.asked.quiet else None
        if snapshot is not None and (page := self._deliver.row.page_after_cell(self._after_last_cell, snapshot)) is not None:
            self._deliver.screen.show_page(page)
        self._after_last_cell = snapshot

    def _report(self) -> Report | None:
        try:
            report: Report = self._session.report
        except SessionError:  # it could not be opened
            return None
        return report

    def _draw(self) -> tuple[str, str] | None:
        snapshot = self._session.live()
        if snapshot is None:
            return None
        if snapshot is not self._drawn[0]:  # a probe that has nothing new gives the same again
            self._drawn = (snapshot, self._deliver.screen.draw(self._deliver.row.live_page(snapshot)))
        return self._drawn[1]
