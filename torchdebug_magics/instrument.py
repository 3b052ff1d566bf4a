"""An instrument: one capability that the user calls by name, through a magic or as a function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchdebug_magics.session import Session

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Page
    from torchdebug_magics.report import Report

__all__ = ["Instrument", "Option"]


@dataclass(frozen=True)
class Option:
    """One flag of a magic, and the keyword argument of the same name (dashes become underscores).

    `argparse` holds the further arguments of ``ArgumentParser.add_argument`` (``type``, ``default``, ``metavar``, ``action``, ``choices``).
    """

    flag: str
    help: str
    argparse: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The keyword argument: ``--keep-going`` is ``keep_going``."""
        return self.flag.lstrip("-").replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class Instrument:
    """The row that registers a capability; everything else (magic, help, completion, display) is made from it.

    Names such as ``"torchdebug_magics.instruments.nanhunt.probe:NanProbe"`` are imported when first needed, so that a row costs nothing.
    """

    name: str
    summary: str
    """One line for the front door."""
    description: str
    """The body of the help: what it does, what it costs, an example."""
    options: tuple[Option, ...] = ()
    probe: str
    """``module:callable`` from the options, as keywords, to a `Probe`."""
    view: str
    """``module:callable`` from a report to a `Page`."""
    live_view: str | None = None
    """``module:callable`` from the probe's live snapshot to a `Page`."""
    examine: str | None = None
    """``module:callable`` from the values named on the magic's line, and the options, to a report; no session is opened."""
    subjects: str = ""
    """How the values of `examine` are written in the help, such as ``LOSS``; empty where it takes none."""

    def __call__(self, *subjects: object, **options: object) -> Any:
        """A `Session` to be entered, or, where subjects are given, the report on them."""
        if not subjects:
            return self.session(**options)
        if self.examine is None:
            msg = f"{self.name}() takes no positional values: write `with torchdebug_magics.{self.name}() as session:`"
            raise TypeError(msg)
        return self.report_on(*subjects, **options)

    def session(self, **options: object) -> Session[Any]:
        """A session that is not yet entered; an unknown option is a TypeError that lists the known ones."""
        return Session(_load(self.probe)(**self._known(options)))

    def report_on(self, *subjects: object, **options: object) -> Report:
        """Examine values at once, without a session."""
        report: Report = _load(self.examine or "")(*subjects, **self._known(options))
        return report

    def page(self, report: Report) -> Page:
        """What a view shows of a report."""
        page: Page = _load(self.view)(report)
        return page

    def live_page(self, snapshot: object) -> Page:
        """What the live view shows of a probe's snapshot."""
        page: Page = _load(self.live_view or "")(snapshot)
        return page

    def _known(self, options: Mapping[str, object]) -> Mapping[str, object]:
        names = [option.name for option in self.options]
        for name in options:
            if name not in names:
                msg = f"{self.name}() has no option {name!r}; it has {', '.join(names) or 'none'}"
                raise TypeError(msg)
        return options


def _load(path: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found
