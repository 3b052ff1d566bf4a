"""Where pages are shown, a notebook's widgets and HTML, Colab's HTML or a terminal's text; and a session: live, then its report."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args
from uuid import uuid4

from IPython.core.displaypub import CapturingDisplayPublisher

from torchdebug_magics import catalog
from torchdebug_magics.html.page import Block, Fold, Page, Verbatim
from torchdebug_magics.instrument import Instrument
from torchdebug_magics.jupyter.arguments import Arguments
from torchdebug_magics.jupyter.recorder import Recorder
from torchdebug_magics.machine.sampler import Sampler
from torchdebug_magics.report import Report
from torchdebug_magics.session import Session, first_interrupt, past_ours, without_ours

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from torchdebug_magics.run.meeting import EngineCell


Mode = Literal["auto", "widget", "frozen", "text"]
MODES: tuple[Mode, ...] = get_args(Mode)
_WIDGET = "application/vnd.jupyter.widget-view+json"
# Nothing to see, in every front end: an output cannot be taken back.
_NOTHING = {"text/plain": "", "text/html": ""}
_FIRST_S = 0.3
"""Delay before the first view, so that a quick cell shows only its report."""
_EVERY_S = 0.25


class Screen:
    """Shows pages in one shell, according to `mode` and the front end's capabilities."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.mode: Mode = "auto"

    # The report ------------------------------------------------------------------------------------------------------

    def show(self, report: Report, row: Instrument, *, widget: bool = False, below: Sequence[Block] = ()) -> None:
        """Show a report and the blocks `below` it. A failure becomes one line, never the cell's error."""
        try:
            page = row.page(report)
            self.show_page(replace(page, blocks=(*page.blocks, *below)), widget=widget)
        except Exception as failure:  # noqa: BLE001 - a view that fails costs its picture, never the cell
            self.say(f"{report.verdict}\n({row.name} could not show its report: {type(failure).__name__}: {failure})")

    def say(self, text: str) -> None:
        """Print plain text, such as help."""
        print(text)  # noqa: T201 - as a magic answers

    def show_page(self, page: Page, *, widget: bool = False) -> None:
        """Show a page: frozen, or as a widget that stays alive."""
        view = None
        if (widget or self.mode == "widget") and self._rich and _has_widgets():
            from torchdebug_magics.jupyter import widget as interactive  # noqa: PLC0415 - imports ipywidgets

            view = interactive.view(page)
        text, html = self.draw(page, is_beside_widget=view is not None)
        self.publish({"text/plain": text, "text/html": html} if html else {"text/plain": text})
        if view is not None:
            # An output of its own: a new kernel has no such widget, and what the file holds of the report must be seen all the same.
            self.publish({"text/plain": "", _WIDGET: _widget_view(view)})

    def draw(self, page: Page, *, is_beside_widget: bool = False) -> tuple[str, str]:
        """Render a page as text and as HTML; the HTML is empty in a terminal."""
        from torchdebug_magics.html import markup, plain  # noqa: PLC0415 - nothing is shown when the extension is loaded

        return plain.render(page), markup.render(page, is_beside_widget=is_beside_widget) if self._rich else ""

    def publish(self, bundle: dict[str, Any], *, display_id: str | None = None, update: bool = False) -> None:
        """Publish a MIME bundle to the front end; a terminal prints its text."""
        transient = {"display_id": display_id} if display_id else None
        self.shell.display_pub.publish(bundle, {}, transient=transient, update=update)

    # The live view ---------------------------------------------------------------------------------------------------

    def live_channel(self, *, lasting: bool = False) -> Channel | None:
        """A new channel, or None if live views are off or cannot be updated; a lasting one may be saved in the notebook."""
        if not self._rich or self.mode == "frozen" or self._captured or self.is_engine:
            return None
        if self.kind != "widgets" or lasting:
            return Channel(self)
        import ipywidgets  # noqa: PLC0415 - in the cell's thread, as LiveView.start() says

        return Channel(self, ipywidgets.HTML)

    @property
    def kind(self) -> Literal["widgets", "html", "text"]:
        """The kind of live view that this front end gets."""
        if not self._rich:
            return "text"
        # Colab would save the widget's state, in a form for which GitHub refuses the whole notebook.
        return "html" if "google.colab" in sys.modules or not _has_widgets() else "widgets"

    @property
    def is_engine(self) -> bool:
        """Whether this is an ipyparallel engine, whose output the client shows for every engine."""
        return type(getattr(self.shell, "kernel", None)).__module__.startswith("ipyparallel.")

    @property
    def _rich(self) -> bool:
        return self.mode != "text" and getattr(self.shell, "kernel", None) is not None

    @property
    def _captured(self) -> bool:
        """Whether outputs are captured in a list or an Output widget, where updates have no effect."""
        if isinstance(self.shell.display_pub, CapturingDisplayPublisher):
            return True
        module = sys.modules.get("ipywidgets.widgets.widget")
        if module is None:
            return False
        widgets = vars(module).get("_instances")  # ipywidgets 8; before it, an attribute of the class
        return any(getattr(one, "msg_id", "") for one in tuple((module.Widget.widgets if widgets is None else widgets).values()))


class Channel:
    """Where a live view is sent: a display handle that is updated or, as its updates cost least, a widget in it."""

    def __init__(self, screen: Screen, new_widget: Callable[[str], Any] | None = None) -> None:
        self._screen = screen
        self._new_widget = new_widget
        self._widget: Any = None
        self._id = uuid4().hex
        self._is_shown = False

    def send(self, text: str, html: str) -> None:
        """Replace the live view."""
        if self._widget is not None:
            self._widget.value = html
            return
        shown: dict[str, object] = {"text/html": html}
        if self._new_widget is not None:
            self._widget = self._new_widget(html)
            shown = {_WIDGET: _widget_view(self._widget)}
        is_update, self._is_shown = self._is_shown, True
        # By hand, as ipywidgets 7 drops the display_id, and the widget could not be replaced.
        self._screen.publish({"text/plain": text, **shown}, display_id=self._id, update=is_update)

    def close(self) -> None:
        """Remove the live view; called by the thread that runs the cell."""
        if self._is_shown:
            # Replaced before it is closed: a saved notebook would show "Error displaying widget".
            self._screen.publish(_NOTHING, display_id=self._id, update=True)
        for part in (getattr(self._widget, "layout", None), getattr(self._widget, "style", None), self._widget):
            if part is not None:
                part.close()


def show_reports(screen: Screen, stack: ExitStack) -> None:
    """Display a report that is a cell's value as its page, until the stack closes."""

    def bundle(report: Report, include: object = None, exclude: object = None) -> dict[str, str]:  # noqa: ARG001 - IPython's signature
        row = catalog.instrument_of(report)
        try:
            text, html = (str(report), "") if row is None else screen.draw(row.page(report))
        except Exception as failure:  # noqa: BLE001 - as in Screen.show()
            return {"text/plain": f"{report.verdict}\n(the report could not be shown: {type(failure).__name__}: {failure})"}
        return {"text/plain": text, "text/html": html} if html else {"text/plain": text}

    # Whole bundles: among the formatters of single types, that of text would prefer a dataclass's own repr.
    formatter: Any = screen.shell.display_formatter
    formatter.mimebundle_formatter.for_type(Report, bundle)
    stack.callback(formatter.mimebundle_formatter.pop, Report, None)


def _has_widgets() -> bool:
    return importlib.util.find_spec("ipywidgets") is not None


def _widget_view(widget: Any) -> dict[str, object]:
    return {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}


class Delivery:
    """Delivers a report: stores it in a variable, writes it to a file, shows it."""

    def __init__(
        self, row: Instrument, asked: Arguments, screen: Screen, keep: Callable[[str, Report], None], *, only_findings: bool = False
    ) -> None:
        self.row = row
        self.asked = asked
        self.screen = screen
        self.only_findings = only_findings
        """Whether nothing is shown of a report that has found nothing, nor while the cell runs."""
        self._keep = keep

    def __call__(self, report: Report, *, is_shown: bool = True, below: Sequence[Block] = ()) -> None:
        """Store first and show last, so that a failure to show loses nothing; the blocks `below` end the page."""
        if self.only_findings and report.main_stage() is None:
            return
        if self.asked.output:
            self.screen.shell.user_ns[self.asked.output] = report
        self._keep(self.row.name, report)
        if self.asked.json:
            self._write(self.asked.json, report)
        if is_shown and not self.asked.quiet:
            self.screen.show(report, self.row, widget=self.asked.widget, below=below)

    def _write(self, path: Path, report: Report) -> None:
        try:
            path.write_text(report.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            self.screen.say(f"the report could not be written to {path}: {error}")


@contextmanager
def watched_work(row: Instrument, screen: Screen, *, is_quiet: bool) -> Iterator[Callable[[object], None]]:
    """Yields a callable that takes snapshots of long work; the latest one is shown live."""
    latest: list[object] = []
    view = LiveView(lambda: latest[0] if latest else None, row, screen)

    def take(snapshot: object) -> None:
        is_first = not latest
        latest[:] = [snapshot]
        if is_first and not is_quiet:
            view.start()

    try:
        yield take
    finally:
        view.stop()


class ShownSession:
    """A session with its live view and report; may be exited twice, as the second exit finishes one that was interrupted."""

    def __init__(self, session: Session[Any], deliver: Delivery, recorder: Recorder, *, lasting: bool = False) -> None:
        self._session = session
        self._deliver = deliver
        self._recorder = recorder
        self._live = LiveView(session.live, deliver.row, deliver.screen, lasting=lasting)
        screen, row = deliver.screen, deliver.row
        self._is_live = row.is_live  # now: it imports the view, which a probe that is attached would see
        self._engine: EngineCell | None = None
        if screen.is_engine and row.is_followed and not lasting:
            from torchdebug_magics.run.meeting import EngineCell  # noqa: PLC0415 - it imports torch

            self._engine = EngineCell(row, str((screen.shell.user_ns.get("_ih") or [""])[-1]))
        self._after_last_cell: object | None = None
        self._delivered = False
        self._below: tuple[Fold, ...] = ()
        """The full traceback of an error whose cell shows a shortened one."""

    def __enter__(self) -> Self:
        self._session.__enter__()
        if self._session.is_recorded:
            self._recorder.start(self._session)
        if self._engine is not None:
            self._engine.begin()
        if self._is_seen and self._is_live and not self._deliver.only_findings:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._session.__exit__(kind, error, trace)
        except BaseException as failure:
            self.traceback_of(failure)  # its report comes first, and folds the full one
            raise
        finally:
            self._recorder.stop(self._session)
            try:
                if not self._delivered and self._session.has_ended:  # not one that could not be opened
                    report: Report = self._session.report
                    is_shown = True
                    if self._engine is not None:
                        report, is_shown = self._engine.merged(report, error), not self._engine.is_shown_elsewhere
                    self._deliver(report, is_shown=is_shown, below=self._below)
                    self._delivered = True
            finally:
                self._live.stop()  # last: the output never shrinks to nothing between the live view and the report

    def live(self) -> object | None:
        """The probe's snapshot."""
        return self._session.live()

    def traceback_of(self, error: BaseException) -> list[str]:
        """See `Session`; also where the report explains an error that was raised in a library.

        An error that draws itself does so where no report is below, and is not one of a library.
        """
        draws_itself = callable(getattr(error, "_render_traceback_", None))
        lines = [] if draws_itself and not self._is_seen else self._session.traceback_of(error)
        if not lines and not draws_itself and not self._deliver.asked.quiet:
            lines = self._deliver.row.traceback_of(error)
        if lines:
            self._below = folded(error)
        return lines

    def after_cell(self) -> None:
        """For a lasting session: show its page about the cell that ended."""
        snapshot = None if self._deliver.asked.quiet else self._session.live()
        if snapshot is not None and (page := self._deliver.row.page_after_cell(self._after_last_cell, snapshot)) is not None:
            self._deliver.screen.show_page(page)
        self._after_last_cell = snapshot

    @property
    def _is_seen(self) -> bool:
        """Whether its report is shown below the cell."""
        return not (self._deliver.asked.quiet or (self._engine is not None and self._engine.is_shown_elsewhere))


def folded(error: BaseException) -> tuple[Fold, ...]:
    """The full traceback of an error, folded."""
    error = first_interrupt(error)
    without_ours(error)
    own = getattr(error, "_render_traceback_", None)
    lines = own() if callable(own) else traceback.format_exception(type(error), error, past_ours(error.__traceback__))
    text = ("\n" if callable(own) else "").join(lines).rstrip()
    return (Fold("The full traceback", (Verbatim(text),)),) if text else ()


class LiveView:
    """Draws and sends a view from `start` to `stop`."""

    def __init__(self, snapshot: Callable[[], object | None], row: Instrument, screen: Screen, *, lasting: bool = False) -> None:
        self._snapshot = snapshot
        self._row = row
        self._drawn: tuple[object, tuple[str, str]] = (None, ("", ""))
        """The latest snapshot, as text and HTML."""
        self._screen = screen
        self._lasting = lasting
        self._channel: Channel | None = None
        self._sent = ("", "")
        # Its context ties what the thread sends to the cell that started it.
        self._sampler = Sampler(self._look, name="live", every_s=_EVERY_S, first_s=_FIRST_S)
        self._failure: Exception | None = None

    def start(self) -> None:
        """Start the thread, if the screen supports live views."""
        try:
            self._channel = self._screen.live_channel(lasting=self._lasting)
            if self._channel is None:
                return
            drawn = self._draw()  # whatever this imports is then imported by this thread, never beside an import of the user's
            if self._lasting and drawn is not None:  # at once, as from the thread it may come when another cell runs, and be shown there
                self._send(*drawn)
        except Exception as failure:  # noqa: BLE001 - the view is a courtesy: the session goes on
            self._failure = failure
            return
        self._sampler.start()

    def stop(self) -> None:
        """Join the thread and remove the view; idempotent."""
        self._sampler.stop()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            channel.close()
        failure = self._failure or self._sampler.failure
        self._failure = self._sampler.failure = None
        if failure is not None:
            self._screen.say(f"(the live view failed: {type(failure).__name__}: {failure})")

    def _draw(self) -> tuple[str, str] | None:
        snapshot = self._snapshot()
        if snapshot is None:
            return None
        if snapshot is not self._drawn[0]:  # a probe that has nothing new gives the same again
            self._drawn = (snapshot, self._screen.draw(self._row.live_page(snapshot)))
        return self._drawn[1]

    def _look(self) -> None:
        drawn = self._draw()
        if drawn is not None and drawn != self._sent and not self._sampler.is_stopping:
            self._send(*drawn)

    def _send(self, text: str, html: str) -> None:
        if self._channel is not None:
            self._channel.send(text, html)
            self._sent = (text, html)
