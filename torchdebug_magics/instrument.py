"""An instrument: one capability, called through a magic or as a function of the same name."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdebug_magics.errors import SessionError
from torchdebug_magics.ranks.compared import Compared
from torchdebug_magics.ranks.report import RanksReport
from torchdebug_magics.ranks.transport import is_cut
from torchdebug_magics.session import Session

if TYPE_CHECKING:
    from collections import deque

    from torchdebug_magics.html.page import Page
    from torchdebug_magics.ranks.transport import Job
    from torchdebug_magics.report import Report


_FOLLOWED = "torchdebug_magics.probing.children.following:FollowedRanks"
_OWN_CALLS = "torchdebug_magics.probing.interrupted:without_libraries"
_CUT_SHORT = "torchdebug_magics.html.page:cut_short_by"
_RANKS_VIEW, _SHORT_VIEW = "torchdebug_magics.ranks.view:page", "torchdebug_magics.ranks.view:short_page"
_CHECKED = "torchdebug_magics.probing.fix_code:checked"
_APPLICABLE = "torchdebug_magics.html.page:applicable"
_EDITED = "torchdebug_magics.probing.edits:with_edits"
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Examined:
    """The result of examining values."""

    report: Report | None
    """None if there is nothing to show."""
    error: BaseException | None = None
    """Raised after the report was shown."""


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
    """The row that registers a capability; magic, help, completion and display are derived from it.

    Names such as ``"torchdebug_magics.instruments.nanhunt.probe:NanProbe"`` are imported when first needed, so that a row costs nothing.
    """

    name: str
    summary: str
    """One line for ``%torchdebug``."""
    description: str
    """The help text: what it does, its cost, an example."""
    options: tuple[Option, ...] = ()
    probe: str | None = None
    """``module:callable`` from the options, as keyword arguments, to a `Probe`; None if there is no session, only `examine`."""
    view: str
    """``module:callable`` from a report to a `Page`."""
    over_ranks: str | None = None
    """``module:callable`` from a rank's report to the part `Compared` with other ranks; None if child processes are not followed."""
    live_view: str | None = None
    """``module:callable`` from the probe's live snapshot to a `Page`."""
    lasting: bool = False
    """Whether ``%name on`` opens a session over any number of cells, until ``%name off``."""
    line_lasts: bool = False
    """Whether the bare line ``%name`` does the same, in place of opening a session for the rest of its cell."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Words accepted on the line, such as ``status``, each with a ``module:callable`` that returns a report from the
    live snapshot of the lasting session, or from None."""
    after_cell: str | None = None
    """``module:callable`` from two live snapshots of a lasting session to a `Page` shown after the cell between them, or None."""
    black_box: bool = False
    """Whether the kernel's position is recorded while a session is open, so that the next kernel reports it if this one is killed."""
    leaves: str = "everything is as your code left it"
    """The state after an error or an interrupt, as said below its shortened traceback."""
    reruns: bool = False
    """Whether the probe takes ``runs``: a bounded deque, the same in every run of the same cell, as its memory across runs;
    None outside a cell."""
    runs_again: bool = False
    """Whether the probe takes ``body``: the code of the session, to be rerun; None if it is unknown."""
    knows_output: bool = False
    """Whether the probe takes ``kept``: whether the report is stored in a variable."""
    examine: str | None = None
    """``module:callable`` from the values on the magic's line, and the options, to a report or `Examined`; no session is opened."""
    tells: bool = False
    """Whether `examine` takes ``progress``: a callable that receives snapshots for the live view."""
    says: bool = False
    """Whether its function prints the verdict on a value and returns None, for use in the middle of other code."""
    subjects: str = ""
    """The placeholder for the values of `examine` in the help, such as ``LOSS``; empty if there are none."""
    bare_words: bool = False
    """Whether words on the magic's line may stand for themselves, without quotes, as in ``%memmark before forward``."""
    takes_names: bool = False
    """Whether `examine` takes ``names``: the source of each value on the magic's line, such as ``runs[0]``."""
    takes_keywords: bool = False
    """Whether `examine` takes ``keywords`` for keyword values, as in ``%shapes model x mask=mask``."""
    called: str | None = None
    """``module:callable`` from the callee in a line such as ``%shapes model(x)`` to the subject, or None to evaluate the call itself."""
    after_error: str | None = None
    """``module:callable`` from the previous cell's exception, and the options, to the bare line's report, or None.

    The probe then receives ``last_error="ValueError: ..."``.
    """

    functions: Mapping[str, str] = field(default_factory=dict)
    """Further functions by name, each a ``module:callable``: ``torchdebug_magics.hangwatch.look()``."""

    def __getattr__(self, name: str) -> Any:
        functions = vars(self).get("functions", {})
        if name in functions:
            return _load(functions[name])
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg)

    @property
    def magic(self) -> str:
        """The magic as written: ``%%nanhunt`` above a cell, ``%memclean`` on a line."""
        return f"%{self.name}" if self.probe is None else f"%%{self.name}"

    def __call__(self, *subjects: object, **options: object) -> Any:
        """A `Session` to enter, or the report if subjects are given or there is no session."""
        if not subjects and self.probe is not None:
            return self.session(**options)
        if len(subjects) == 1 and isinstance(subjects[0], str) and subjects[0] in self.words:
            return self.report_of_word(subjects[0])
        if self.examine is None:
            msg = f"{self.name}() takes no positional values: write `with torchdebug_magics.{self.name}() as session:`"
            raise TypeError(msg)
        examined = self.report_on(subjects, *self._apart(options))
        if examined.error is not None:
            raise examined.error
        if not (self.says and subjects):
            return examined.report
        if examined.report is not None:
            print(examined.report)  # noqa: T201 - as it was asked to
        return None

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser."""
        for option in self.options:
            parser.add_argument(option.flag, dest=option.name, help=option.help.replace("%", "%%"), **option.argparse)

    def session(self, **options: object) -> Session[Any]:
        """A new session; raises TypeError for an unknown option."""
        return self.session_of_cell(options)

    def session_of_cell(
        self,
        options: Mapping[str, object],
        *,
        runs: deque[Any] | None = None,
        after: BaseException | None = None,
        body: object | None = None,
        kept: bool = False,
    ) -> Session[Any]:
        """A new session for a cell; the arguments are described at `reruns`, `after_error`, `runs_again` and `knows_output`."""
        if self.probe is None:
            msg = f"{self.name} looks at once and takes no body: write `{self.magic}` on a line of its own"
            raise SessionError(msg)
        known = {"runs": (self.reruns, runs), "body": (self.runs_again, body), "kept": (self.knows_output, kept)}
        told = {name: value for name, (is_asked, value) in known.items() if is_asked}
        if after is not None and self.after_error is not None:
            told["last_error"] = f"{type(after).__name__}: {after}".strip().splitlines()[0]
        return Session(self._following(_load(self.probe)(**self._known(options), **told), options), _checked)

    def session_in_rank(self, job: Job) -> Session[Any]:
        """A new session in a process that another session launched."""
        return Session(self._following(_load(self.probe or "")(**job.options), job.options, job), _checked)

    def compared(self, report: Report) -> Compared:
        """The part of a rank's report that is compared with the other ranks."""
        compared: Compared = _load(self.over_ranks)(report) if self.over_ranks else Compared()
        return compared

    def _following(self, probe: Any, options: Mapping[str, object], job: Job | None = None) -> Any:
        """The probe, extended to ranks launched while it is attached, if torch is imported: a gauge does not import it."""
        if self.over_ranks is None or "torch" not in sys.modules:
            return probe
        return _load(_FOLLOWED)(probe, self.name, options, self.compared, job)

    def report_on(
        self,
        subjects: Sequence[object],
        keywords: Mapping[str, object],
        options: Mapping[str, object],
        names: Sequence[str] = (),
        progress: Callable[[object], None] = lambda _: None,
    ) -> Examined:
        """Examine values without a session; `names` is their source, if known. `progress`: see `tells`."""
        named: dict[str, object] = {"keywords": keywords} if self.takes_keywords else {}
        if self.takes_names:
            named["names"] = names
        if self.tells:
            named["progress"] = progress
        found = _load(self.examine or "")(*subjects, **named, **self._known(options))
        examined = found if isinstance(found, Examined) else Examined(found)
        return examined if examined.report is None else replace(examined, report=_checked(examined.report))

    def report_of_word(self, word: str, live: object | None = None) -> Report:
        """The report for one of `words`; `live` is the snapshot of the lasting session."""
        report: Report = _load(self.words[word])(live)
        return report

    def subject_of(self, called: object) -> object | None:
        """The subject if `called` is called on the magic's line; None if the call itself is evaluated."""
        return _load(self.called)(called) if self.called else None

    def report_after(self, error: BaseException, options: Mapping[str, object]) -> Report | None:
        """The report on the previous cell's error, or None."""
        report: Report | None = _load(self.after_error)(error, **self._known(options)) if self.after_error else None
        return None if report is None else _checked(report, error)

    def traceback_of(self, error: BaseException, *, is_folded: bool = True) -> list[str]:
        """The lines shown in place of an error's traceback, which a report holds if it `is_folded`; empty for the plain traceback."""
        lines: list[str] = _load(_OWN_CALLS)(error)
        full = "; the report holds the full traceback" if is_folded else ""
        return [*lines, f"({self.leaves}{full})"] if lines else []

    def engine_cell(self, source: str) -> Any:
        """The coordination of a session in a cell that several ipyparallel engines run."""
        return _load("torchdebug_magics.run.meeting:EngineCell")(self, source)

    def page(self, report: Report) -> Page:
        """The page of a report."""
        page: Page
        if isinstance(report, RanksReport):
            page = _load(_RANKS_VIEW)(report, self.page)
        else:
            page = _load(_SHORT_VIEW)(report, self.name) if is_cut(report) else _load(self.view)(report)
        page = _load(_CUT_SHORT)(page, report.cut_short) if report.cut_short else page
        page = _load(_APPLICABLE)(page, report.fix_state) if report.edits else page
        return page

    def live_page(self, snapshot: object) -> Page:
        """The page of a live snapshot."""
        page: Page = _load(self.live_view or "")(snapshot)
        return page

    def page_after_cell(self, before: object | None, now: object) -> Page | None:
        """The page of a lasting session after a cell, or None; `before` is None for the first cell."""
        page: Page | None = _load(self.after_cell)(before, now) if self.after_cell else None
        return page

    def _apart(self, named: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
        """Split keyword arguments into (values, options): an option is a plain value under an option's name."""
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


def writable_path(text: str) -> Path:
    """Parse the path of a file to write, as a type for argparse."""
    path = Path(text).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        msg = f"{text!r} cannot be written: {'it' if path.is_dir() else 'its folder'} is {'a folder' if path.is_dir() else 'not there'}"
        raise argparse.ArgumentTypeError(msg)
    return path


def _checked(report: Any, error: BaseException | None = None) -> Any:
    """The report with no code in its fixes but what could run; a process without torch has made none."""
    return _load(_EDITED)(_load(_CHECKED)(report, error)) if "torch" in sys.modules else report


def _load(path: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found
