"""Where pages are shown: a notebook's widgets and HTML, Colab's HTML, or a terminal's text."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args
from uuid import uuid4

from IPython.core.displaypub import CapturingDisplayPublisher

from torchdebug_magics import catalog
from torchdebug_magics.report import Report

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from torchdebug_magics.html.page import Page
    from torchdebug_magics.instrument import Instrument

__all__ = ["MODES", "Channel", "Mode", "ReportFormatter", "Screen"]

Mode = Literal["auto", "widget", "frozen", "text"]
MODES: tuple[Mode, ...] = get_args(Mode)
_WIDGET = "application/vnd.jupyter.widget-view+json"
# Nothing to see, in every front end: an output cannot be taken back.
_NOTHING = {"text/plain": "", "text/html": ""}


class Channel(Protocol):
    """Where a live view goes."""

    def send(self, text: str, html: str) -> None:
        """Show this instead of what was shown."""

    def close(self) -> None:
        """Take it away; called by the thread that runs the cell."""


class Screen:
    """Shows pages in one shell, in the way that `mode` asks for and the front end allows."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.mode: Mode = "auto"

    # The report ------------------------------------------------------------------------------------------------------

    def show(self, report: Report, row: Instrument, *, widget: bool = False) -> None:
        """Show a report. What fails here becomes one line: never the cell's error."""
        try:
            self.show_page(row.page(report), widget=widget)
        except Exception as failure:  # noqa: BLE001 - a view that fails costs its picture, never the cell
            self.say(f"{report.verdict}\n({row.name} could not show its report: {type(failure).__name__}: {failure})")

    def say(self, text: str) -> None:
        """Plain words, such as help, that are no report."""
        print(text)  # noqa: T201 - as a magic answers

    def show_page(self, page: Page, *, widget: bool = False) -> None:
        """Show a page: frozen, or as a widget that stays alive."""
        text, html = self.draw(page)
        bundle: dict[str, Any] = {"text/plain": text}
        if self._rich:
            bundle["text/html"] = html
            if (widget or self.mode == "widget") and _has_widgets():
                from torchdebug_magics.jupyter import widget as interactive  # noqa: PLC0415 - imports ipywidgets

                bundle[_WIDGET] = _widget_view(interactive.view(page))
        self.publish(bundle)

    def draw(self, page: Page) -> tuple[str, str]:
        """A page as text and as HTML; the HTML is empty where none is shown."""
        from torchdebug_magics.html import markup, plain  # noqa: PLC0415 - nothing is shown when the extension is loaded

        return plain.render(page), markup.render(page) if self._rich else ""

    def publish(self, bundle: dict[str, Any], *, display_id: str | None = None, update: bool = False) -> None:
        """Send a bundle to the front end; a terminal prints its text."""
        transient = {"display_id": display_id} if display_id else None
        self.shell.display_pub.publish(bundle, {}, transient=transient, update=update)

    # The live view ---------------------------------------------------------------------------------------------------

    def live_channel(self, *, lasting: bool = False) -> Channel | None:
        """A new channel, or None where no live view is wanted or can be updated; a saved notebook may hold a lasting one."""
        if not self._rich or self.mode == "frozen" or self._captured or self.is_engine:
            return None
        return _WidgetChannel(self) if self.kind == "widgets" and not lasting else _HtmlChannel(self)

    @property
    def kind(self) -> Literal["widgets", "html", "text"]:
        """What the live view is made of."""
        if not self._rich:
            return "text"
        # Colab would save the widget's state, in a form for which GitHub refuses the whole notebook.
        return "html" if "google.colab" in sys.modules or not _has_widgets() else "widgets"

    def cell_source(self) -> str:
        """The text of the cell that runs."""
        return str((self.shell.user_ns.get("_ih") or [""])[-1])

    @property
    def is_engine(self) -> bool:
        """Whether the cells come from ipyparallel, which shows what every engine shows."""
        return type(getattr(self.shell, "kernel", None)).__module__.startswith("ipyparallel.")

    @property
    def _rich(self) -> bool:
        return self.mode != "text" and getattr(self.shell, "kernel", None) is not None

    @property
    def _captured(self) -> bool:
        """Whether outputs now go to a list, or into an Output widget, where no update would reach them."""
        if isinstance(self.shell.display_pub, CapturingDisplayPublisher):
            return True
        module = sys.modules.get("ipywidgets.widgets.widget")
        if module is None:
            return False
        widgets = vars(module).get("_instances")  # ipywidgets 8; before it, an attribute of the class
        return any(getattr(one, "msg_id", "") for one in tuple((module.Widget.widgets if widgets is None else widgets).values()))


class _HtmlChannel:
    """An output that is updated; no comm is opened."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._id = ""

    def send(self, text: str, html: str) -> None:
        update = bool(self._id)
        self._id = self._id or uuid4().hex
        self._screen.publish({"text/plain": text, "text/html": html}, display_id=self._id, update=update)

    def close(self) -> None:
        if self._id:
            self._screen.publish(_NOTHING, display_id=self._id, update=True)


class _WidgetChannel:
    """An HTML widget, made when there is something to show: updates of widgets are the lightest."""

    def __init__(self, screen: Screen) -> None:
        import ipywidgets  # noqa: PLC0415 - in the cell's thread, as LiveView.start() says

        self._new = ipywidgets.HTML
        self._screen = screen
        self._id = uuid4().hex
        self._widget: Any = None

    def send(self, text: str, html: str) -> None:
        if self._widget is not None:
            self._widget.value = html
            return
        self._widget = self._new(html)
        # By hand, as ipywidgets 7 drops the display_id, and the widget could not be replaced.
        self._screen.publish({"text/plain": text, _WIDGET: _widget_view(self._widget)}, display_id=self._id)

    def close(self) -> None:
        if self._widget is None:
            return
        # Replaced before it is closed: a saved notebook would show "Error displaying widget".
        self._screen.publish(_NOTHING, display_id=self._id, update=True)
        for part in (self._widget.layout, getattr(self._widget, "style", None), self._widget):
            if part is not None:
                part.close()


# Reports show themselves --------------------------------------------------------------------------------------------


class ReportFormatter:
    """Let a report that is a cell's value show its page."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        # Whole bundles: among the formatters of single types, that of text would prefer a dataclass's own repr.
        formatter: Any = screen.shell.display_formatter
        self._bundles = formatter.mimebundle_formatter

    def install(self) -> None:
        """For every report, as all have one base."""
        self._bundles.for_type(Report, self._bundle)

    def uninstall(self) -> None:
        """Reports are shown as any object again."""
        self._bundles.pop(Report, None)

    def _bundle(self, report: Report, include: object = None, exclude: object = None) -> dict[str, str]:  # noqa: ARG002 - IPython's signature
        row = catalog.instrument_of(report)
        try:
            text, html = (str(report), "") if row is None else self._screen.draw(row.page(report))
        except Exception as failure:  # noqa: BLE001 - as in Screen.show()
            return {"text/plain": f"{report.verdict}\n(the report could not be shown: {type(failure).__name__}: {failure})"}
        return {"text/plain": text, "text/html": html} if html else {"text/plain": text}


def _has_widgets() -> bool:
    return importlib.util.find_spec("ipywidgets") is not None


def _widget_view(widget: Any) -> dict[str, object]:
    return {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
