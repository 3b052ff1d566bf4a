"""Where pages are shown: a notebook's widgets and HTML, Colab's HTML, or a terminal's text."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args
from uuid import uuid4

from IPython.core.displaypub import CapturingDisplayPublisher

from torchdebug_magics import catalog
from torchdebug_magics.html.page import Block, Page
from torchdebug_magics.instrument import Instrument
from torchdebug_magics.report import Report

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


Mode = Literal["auto", "widget", "frozen", "text"]
MODES: tuple[Mode, ...] = get_args(Mode)
_WIDGET = "application/vnd.jupyter.widget-view+json"
# Nothing to see, in every front end: an output cannot be taken back.
_NOTHING = {"text/plain": "", "text/html": ""}


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
