"""An instrument: one capability, called through a magic or as a function of the same name.

Its row says what it is called and which options it takes; what it does is found in its package by name, when first needed:

=============================================  ========================================================================================
``probe.watch(context, **options)``            the `Probe` of a session; without ``probe.py`` it watches no cell
``examine.examine(context, *values, **...)``   a report on values, or `Examined`; without values, None where there is nothing to report
``report.compared(report)``                    the part of a rank's report that is compared; without it, launched ranks are not followed
``report.LEAVES``                              how everything is after an error or an interrupt, if not as the user's code left it
``view.page(report)``                          its `Page`
``view.live_page(snapshot)``                   the page of a live snapshot; without it, nothing is shown while the cell runs
``view.page_after_cell(before, now)``          the page after each cell of a lasting session, from two live snapshots, or None
=============================================  ========================================================================================
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torchdebug_magics.errors import SessionError, error_line
from torchdebug_magics.ranks.compared import Compared, is_cut
from torchdebug_magics.ranks.report import RanksReport
from torchdebug_magics.session import ReportT, Session

if TYPE_CHECKING:
    import ast

    from torch import nn

    from torchdebug_magics.html.page import Page
    from torchdebug_magics.ranks.compared import Job
    from torchdebug_magics.report import Report


_PLAIN = (bool, int, float, str, type(None))


class Body(Protocol):
    """The code of a session, a cell below its magics or a function, which may run any number of times."""

    namespace: dict[str, Any]
    """Its global names."""
    hidden: frozenset[str]
    """Names in the namespace that are not the user's."""
    roots: Sequence[object]
    """Other objects that it can reach."""
    variables: Mapping[str, object]
    """The values of the outside names in its code, as they are now."""
    statements: Sequence[ast.stmt]
    """Its source, where that is known."""
    file: str
    """The file name under which its source was compiled."""
    refusal: str
    """Why it cannot be run a second time; empty where it can."""

    def left(self) -> Mapping[str, object]:
        """What a run has left to the user, by name."""

    def run(self) -> None:
        """Run it once more. Its exceptions propagate, and nothing is displayed; the caller silences its streams."""


@dataclass(frozen=True, kw_only=True)
class CellContext:
    """What a magic knows of its line and cell; a script knows nothing of the kind."""

    names: Sequence[str] = ()
    """The source of each value on the magic's line, such as ``runs[0]``."""
    keywords: Mapping[str, object] = field(default_factory=dict)
    """Named values on the line, as in ``%shapes model x mask=mask``."""
    last_error: BaseException | None = None
    """The exception that ended the previous cell, where the magic's line is bare."""
    keeps_output: bool = False
    """Whether the report is stored in a variable."""
    live: object | None = None
    """The live snapshot of the instrument's lasting session."""
    progress: Callable[[object], None] = lambda _: None
    """Takes snapshots for the live view of long work."""

    def body(self) -> Body | None:
        """The code of the session, to be rerun; None if it is unknown."""
        return None

    def file(self) -> str:
        """Under which the running cell was compiled; empty where that is not known."""
        return ""

    def unshown(self) -> AbstractContextManager[object]:
        """Inside, what the user's code displays is not shown."""
        return nullcontext()

    def earlier_runs(self) -> deque[Any] | None:
        """A bounded queue, the same in every run of the same cell, to remember across runs; None outside a cell."""
        return None

    def of(self, _name: str) -> CellContext:
        """The same for another instrument of that name, which remembers earlier runs by itself."""
        return self

    @property
    def last_error_line(self) -> str:
        """``ValueError: ...``; empty without an error."""
        return error_line(self.last_error)


SCRIPT = CellContext()
"""The context of a function that is called in a script."""


@dataclass(frozen=True)
class Examined:
    """The result of examining values."""

    report: Report | None
    """None if there is nothing to show."""
    error: BaseException | None = None
    """Raised after the report was shown."""
    is_said: bool = False
    """Whether the function, called in the middle of other code, prints the report and returns None."""


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
    """The row that registers a capability; magic, help, completion and display are derived from it."""

    name: str
    module: str
    """The package in which the functions above are looked for."""
    summary: str
    """One line for ``%torchdebug``."""
    description: str
    """The help text: what it does, its cost, an example."""
    options: tuple[Option, ...] = ()
    subjects: str = ""
    """The values to examine, for the help: ``MODEL INPUT``. ``NAME=VALUE`` among them: named values, too; in quotes, as ``"LABEL"``: words
    may stand for themselves; ``MODEL`` first: in place of the call ``model(x)``, the model and its arguments are the values."""
    lasting: Literal["", "on", "line"] = ""
    """``on``: ``%name on`` opens a session over any number of cells, until ``%name off``; ``line``: the bare line ``%name`` does, too."""

    def __getattr__(self, name: str) -> Any:
        """A further function of ``probe``, such as ``torchdebug_magics.hangwatch.look()``."""
        function = None if name.startswith("_") else self._function("probe", name)
        if isinstance(function, FunctionType) and function.__module__ == f"{self.module}.probe":
            return function
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg)

    @property
    def watches(self) -> bool:
        """Whether there is a session."""
        return self._has("probe")

    @property
    def examines(self) -> bool:
        """Whether values can be examined."""
        return self._has("examine")

    @property
    def leaves(self) -> str:
        """How everything is after an error or an interrupt, for below its shortened traceback."""
        leaves: str = self._function("report", "LEAVES") or "everything is as your code left it"
        return leaves

    @property
    def is_live(self) -> bool:
        """Whether there is a live view."""
        return self._function("view", "live_page") is not None

    @property
    def is_followed(self) -> bool:
        """Whether processes that a session launches run under the instrument, too."""
        return self._function("report", "compared") is not None

    @property
    def takes_keywords(self) -> bool:
        """Whether values to examine may have names."""
        return "=" in self.subjects

    @property
    def takes_words(self) -> bool:
        """Whether words to examine may stand for themselves, without quotes, as in ``%memmark before forward``."""
        return self.subjects.startswith('"')

    @property
    def function(self) -> str:
        """The name of its function in `torchdebug_magics`, and of its package."""
        return self.module.rpartition(".")[2]

    @property
    def magic(self) -> str:
        """The magic as written: ``%%nanhunt`` above a cell, ``%memclean`` on a line."""
        return f"%%{self.name}" if self.watches else f"%{self.name}"

    def __call__(self, *subjects: object, **options: object) -> Any:
        """A `Session` to enter, or the report if subjects are given or there is no session."""
        if not subjects and self.watches:
            return self.session(**options)
        if not self.examines:
            msg = f"{self.function}() takes no positional values: write `with torchdebug_magics.{self.function}() as session:`"
            raise TypeError(msg)
        keywords, options = self._apart(options)
        examined = self.examined(subjects, options, CellContext(keywords=keywords))
        if examined.error is not None:
            raise examined.error
        if examined.report is None or not examined.is_said:
            return examined.report
        print(examined.report)  # noqa: T201 - the function is for use in the middle of other code
        return None

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser."""
        for option in self.options:
            parser.add_argument(option.flag, dest=option.name, help=option.help.replace("%", "%%"), **option.argparse)

    def session(self, **options: object) -> Session[Any]:
        """A new session; raises TypeError for an unknown option."""
        return self.session_of_cell(options)

    def session_of_cell(self, options: Mapping[str, Any], context: CellContext = SCRIPT, job: Job | None = None) -> Session[Any]:
        """A new session for a cell, a script or a process that another session launched with a `job`."""
        options = self._known(options) if job is None else options  # a launcher tells its ranks more than a user can
        probe = self.probe(options, context)
        if self.is_followed and "torch" in sys.modules:  # a gauge does not import it
            from torchdebug_magics.ranks.launching import FollowedRanks  # noqa: PLC0415

            probe = FollowedRanks(probe, self, options, job)
        return Session(probe, finished)

    def probe(self, options: Mapping[str, Any], context: CellContext) -> Any:
        """What a session runs; raises `SessionError` where there is no session."""
        watch = self._function("probe", "watch")
        if watch is None:
            msg = f"{self.name} looks at once and takes no body: write `{self.magic}` on a line of its own"
            raise SessionError(msg)
        return watch(context, **options)

    def compared(self, report: Report) -> Compared:
        """The part of a rank's report that is compared with the other ranks."""
        compare = self._function("report", "compared")
        return Compared() if compare is None else compare(report)

    def examined(self, subjects: Sequence[object], options: Mapping[str, object], context: CellContext) -> Examined:
        """Examine values without a session."""
        result = self._function("examine", "examine")(context, *subjects, **self._known(options))
        examined = result if isinstance(result, Examined) else Examined(result)
        return examined if examined.report is None else replace(examined, report=finished(examined.report, context.last_error))

    def subject_of(self, called: object) -> nn.Module | None:
        """The model if `called` is a model that is called on the magic's line; None if the call itself is evaluated."""
        if not self.subjects.startswith("MODEL"):
            return None
        from torchdebug_magics.probing.dry_runs.inputs import model_of  # noqa: PLC0415

        return model_of(called)

    def page(self, report: Report) -> Page:
        """The page of a report."""
        from torchdebug_magics.html.page import applicable, cut_short_by  # noqa: PLC0415

        if isinstance(report, RanksReport) or is_cut(report):
            from torchdebug_magics.ranks import view  # noqa: PLC0415

            page = view.page(report, self.page) if isinstance(report, RanksReport) else view.short_page(report, self.name)
        else:
            page = self.contents(report)
        page = cut_short_by(page, report.cut_short) if report.cut_short else page
        return applicable(page, report.fix_state) if report.edits else page

    def contents(self, report: Report) -> Page:
        """What the instrument itself has to say on the page of a report."""
        page: Page = self._function("view", "page")(report)
        return page

    def traceback_of(self, error: BaseException, *, is_folded: bool = True) -> list[str]:
        """The lines shown in place of an error's traceback, which a report holds if it `is_folded`; empty for the plain traceback."""
        from torchdebug_magics.probing.safety import without_libraries  # noqa: PLC0415

        lines = without_libraries(error)
        full = "; the report holds the full traceback" if is_folded else ""
        return [*lines, f"({self.leaves}{full})"] if lines else []

    def live_page(self, snapshot: object) -> Page:
        """The page of a live snapshot."""
        page: Page = self._function("view", "live_page")(snapshot)
        return page

    def page_after_cell(self, before: object | None, now: object) -> Page | None:
        """The page of a lasting session after a cell, or None; `before` is None for the first cell."""
        show = self._function("view", "page_after_cell")
        return None if show is None else show(before, now)

    def _has(self, part: str) -> bool:
        return importlib.util.find_spec(f"{self.module}.{part}") is not None

    def _function(self, part: str, name: str) -> Any:
        """The function of that name in a module of the package; None where there is none."""
        return getattr(importlib.import_module(f"{self.module}.{part}"), name, None) if self._has(part) else None

    def _apart(self, named: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
        """Split keyword arguments into (values, options): an option is a plain value under an option's name."""
        known = {option.name for option in self.options}
        options = {name: value for name, value in named.items() if not self.takes_keywords or (name in known and isinstance(value, _PLAIN))}
        return {name: value for name, value in named.items() if name not in options}, options

    def _known(self, options: Mapping[str, object]) -> Mapping[str, object]:
        names = [option.name for option in self.options]
        for name in options:
            if name not in names:
                msg = f"{self.function}() has no option {name!r}; it has {', '.join(names) or 'none'}"
                raise TypeError(msg)
        return options


def writable_path(text: str) -> Path:
    """Parse the path of a file to write, as a type for argparse."""
    path = Path(text).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        msg = f"{text!r} cannot be written: {'it' if path.is_dir() else 'its folder'} is {'a folder' if path.is_dir() else 'not there'}"
        raise argparse.ArgumentTypeError(msg)
    return path


def finished(report: ReportT, error: BaseException | None = None) -> ReportT:
    """A report as it is handed out: its fixes hold no code but what could run, as edits where the source tells how to apply it.

    A process without torch has made no fix. `error` is what ended the cell.
    """
    if "torch" not in sys.modules:
        return report
    from torchdebug_magics.probing.source.edits import with_edits  # noqa: PLC0415
    from torchdebug_magics.probing.source.fix_check import checked  # noqa: PLC0415

    return with_edits(checked(report, error))
