"""An instrument: one capability that the user calls by name, through a magic or as a function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchdebug_magics.session import Session

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Page
    from torchdebug_magics.report import Report

__all__ = ["Examined", "Instrument", "Option"]

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Examined:
    """What came of examining values."""

    report: Report
    error: BaseException | None = None
    """To be raised when the report has been shown."""


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
    """``module:callable`` from the values named on the magic's line, and the options, to a report or `Examined`; no session is opened."""
    subjects: str = ""
    """How the values of `examine` are written in the help, such as ``LOSS``; empty where it takes none."""
    takes_keywords: bool = False
    """Whether `examine` has a parameter ``keywords`` for values that are named, as in ``%shapes model x mask=mask``."""
    called: str | None = None
    """``module:callable`` from what is called in a line such as ``%shapes model(x)`` to the subject, or None: of that, no call is made."""
    after_error: str | None = None
    """``module:callable`` from the exception of the cell before, and the options, to a report for the bare line; None without facts."""

    def __call__(self, *subjects: object, **options: object) -> Any:
        """A `Session` to be entered, or, where subjects are given, the report on them."""
        if not subjects:
            return self.session(**options)
        if self.examine is None:
            msg = f"{self.name}() takes no positional values: write `with torchdebug_magics.{self.name}() as session:`"
            raise TypeError(msg)
        examined = self.report_on(subjects, *self._apart(options))
        if examined.error is not None:
            raise examined.error
        return examined.report

    def session(self, **options: object) -> Session[Any]:
        """A session that is not yet entered; an unknown option is a TypeError that lists the known ones."""
        return Session(_load(self.probe)(**self._known(options)))

    def report_on(self, subjects: Sequence[object], keywords: Mapping[str, object], options: Mapping[str, object]) -> Examined:
        """Examine values at once, without a session."""
        named = {"keywords": keywords} if self.takes_keywords else {}
        found = _load(self.examine or "")(*subjects, **named, **self._known(options))
        return found if isinstance(found, Examined) else Examined(found)

    def subject_of(self, called: object) -> object | None:
        """What is examined where `called` is called on the magic's line; None where the call itself gives the value."""
        return _load(self.called)(called) if self.called else None

    def report_after(self, error: BaseException, options: Mapping[str, object]) -> Report | None:
        """What the error of the cell before can tell, where it can."""
        report: Report | None = _load(self.after_error)(error, **self._known(options)) if self.after_error else None
        return report

    def page(self, report: Report) -> Page:
        """What a view shows of a report."""
        page: Page = _load(self.view)(report)
        return page

    def live_page(self, snapshot: object) -> Page:
        """What the live view shows of a probe's snapshot."""
        page: Page = _load(self.live_view or "")(snapshot)
        return page

    def _apart(self, named: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
        """(values for the subject, options): an option is a plain value under an option's name."""
        known = {option.name for option in self.options}
        options = {name: value for name, value in named.items() if not self.takes_keywords or (name in known and isinstance(value, _PLAIN))}
        return {name: value for name, value in named.items() if name not in options}, options

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
