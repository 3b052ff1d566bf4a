"""The command line: ``run INSTRUMENT [options] SCRIPT arguments...``; what follows the script is the script's."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, NoReturn, Self

from torchdebug_magics import catalog
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.html import markup, plain
from torchdebug_magics.instrument import Instrument, writable_path
from torchdebug_magics.machine.sampler import Sampler
from torchdebug_magics.probing.after_import import AfterImport
from torchdebug_magics.probing.distributed import this_rank
from torchdebug_magics.probing.source.user_code import locate, user_frame
from torchdebug_magics.ranks.report import RanksReport
from torchdebug_magics.report import Report
from torchdebug_magics.run.meeting import Meeting, meeting_place, sign_every_s
from torchdebug_magics.session import Session

_PROGRAM = "python -m torchdebug_magics"
_NOT_THERE = 2
"""Python's exit code for a file that it cannot open."""
_ENDING_S = 15.0
"""Time for the report of a process that received SIGTERM."""
_RANK = "{rank}"


def main(arguments: Sequence[str]) -> None:
    """Run a script under an instrument. What the script raises is raised, when its traceback has been shown."""
    asked = _asked(arguments)
    row = catalog.instrument(asked.instrument)
    script = Script(asked.script[0], asked.script[1:], is_module=asked.is_module)
    watch = Watch(row, {option.name: getattr(asked, option.name) for option in row.options}, Outputs(row, asked.json, asked.html))
    error: BaseException | None = None
    try:
        with watch, AfterImport("torch", watch.open):
            script.run()
    except BaseException as raised:
        error = raised
        if not isinstance(raised, SystemExit):
            show_error(raised, script, watch.traceback_of)
            sys.excepthook = lambda *_: None  # Python ends with it as ever, and it is on the screen
        raise
    finally:
        if watch.is_here:
            watch.finish(error)


def _asked(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="Debug PyTorch from a terminal.")
    run = parser.add_subparsers(dest="command", required=True, metavar="COMMAND").add_parser(
        "run", help="run a script under an instrument", description="Run a script, or each rank of a job, under an instrument."
    )
    instruments = run.add_subparsers(dest="instrument", required=True, metavar="INSTRUMENT")
    for name in catalog.INSTRUMENTS:
        row = catalog.instrument(name)
        if row.watches:
            _add(instruments.add_parser(name, help=row.summary.replace("%", "%%"), allow_abbrev=False), name, row)
    asked = parser.parse_args(arguments)
    asked.is_module = asked.module is not None
    asked.script = asked.module or asked.script
    if not asked.script:
        instruments.choices[asked.instrument].error("which script? write its file, or -m and the name of a module, behind the options")
    return asked


def _add(parser: argparse.ArgumentParser, name: str, row: Instrument) -> None:
    parser.usage = f"{_PROGRAM} run {name} [options] SCRIPT | -m MODULE [arguments of the script]"
    row.add_options(parser)
    rank = "; with {rank} in its name, each rank writes its own"
    parser.add_argument("--json", metavar="FILE", type=writable_path, help=f"write the report to a file{rank}")
    parser.add_argument("--html", metavar="FILE", type=writable_path, help=f"write the report as a page{rank}")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="run a module, as `python -m` does")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="what is run, and its arguments")


class Script:
    """A script or module, and the arguments it runs with."""

    def __init__(self, name: str, arguments: Sequence[str], *, is_module: bool) -> None:
        self.name = name
        self.code: CodeType | None = None
        """None until it is compiled."""
        self._arguments = list(arguments)
        self._is_module = is_module

    def run(self) -> None:
        """Run it as ``__main__`` until the process ends: threads and exit handlers look up their names there."""
        module = ModuleType("__main__")
        sys.argv[:] = [self.name, *self._arguments]
        # In the order in which Python does it: a package that holds the module sees all of this while it is imported.
        if self._is_module:
            self.code = self._of_module(module)
        else:
            self.code = self._of_file(module)
        sys.modules["__main__"] = module
        exec(self.code, vars(module))  # noqa: S102 - the user's own script

    def _of_file(self, module: ModuleType) -> CodeType:
        path = str(Path(self.name).absolute())
        importer: Any = pkgutil.get_importer(self.name)
        if importer is not None:  # a folder, or an archive, with a `__main__` in it
            _first_on_path(path)
            return self._of_spec(module, importer.find_spec("__main__"), path)
        _first_on_path(str(Path(path).resolve().parent))
        is_compiled = path.endswith(".pyc")
        loader: Any = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", path)
        vars(module).update(__file__=path, __loader__=loader, __cached__=None, __annotations__={})
        try:
            data = loader.get_data(path)
        except OSError as error:
            _stop(f"{sys.orig_argv[0]}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", _NOT_THERE)
        code: CodeType = loader.get_code("__main__") if is_compiled else loader.source_to_code(data, path)
        return code

    def _of_module(self, module: ModuleType) -> CodeType:
        try:
            spec = importlib.util.find_spec(self.name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{self.name}.__main__")
        except ModuleNotFoundError as error:
            if error.name is None or not self.name.startswith(error.name):
                raise
            spec = None
        code = self._of_spec(module, spec, self.name)
        sys.argv[0] = vars(module)["__file__"]
        return code

    def _of_spec(self, module: ModuleType, spec: ModuleSpec | None, place: str) -> CodeType:
        loader: Any = None if spec is None else spec.loader
        code: CodeType | None = None if spec is None or loader is None else loader.get_code(spec.name)
        if spec is None or code is None:
            what = f"No module named {self.name}" if self._is_module else f"can't find '__main__' module in {place!r}"
            _stop(f"{sys.executable}: {what}", 1)
        vars(module).update(
            __file__=spec.origin, __loader__=loader, __cached__=spec.cached, __package__=spec.parent, __spec__=spec, __annotations__={}
        )
        return code


def show_error(error: BaseException, script: Script, own_lines: Callable[[BaseException], Sequence[str]]) -> None:
    """Print the traceback that Python would print, without frames of this package; an error of the instrument has its own lines."""
    ask = getattr(error, "_render_traceback_", None) if isinstance(error, TorchDebugError) else None
    lines = ask() if ask is not None else own_lines(error)
    if lines:
        print(*lines, sep="\n", file=sys.stderr, flush=True)  # noqa: T201 - where Python prints a traceback
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not script.code:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _first_on_path(folder: str) -> None:
    """Put the folder first on `sys.path`, unless Python runs with ``-P``."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _stop(why: str, code: int) -> NoReturn:
    print(why, file=sys.stderr)  # noqa: T201 - as Python says it
    raise SystemExit(code)


class Terminated(KeyboardInterrupt):
    """Stands for SIGTERM when the session closes; never raised."""


class Watch:
    """Watches the process it is created in; a fork of that process ends as it would without."""

    def __init__(self, row: Instrument, options: Mapping[str, Any], outputs: Outputs) -> None:
        self._row = row
        self._options = options
        self._outputs = outputs
        self._rank, self._ranks_count = this_rank.launched_as()
        self._began_s = time.monotonic()
        self._owner = os.getpid()
        self._session: Session[Any] | None = None
        self._stack = ExitStack()
        self._meeting: Meeting | None = None
        self._is_finishing = False

    @property
    def is_here(self) -> bool:
        """Whether this is not a fork."""
        return os.getpid() == self._owner

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._told_to_end)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session is not None:
            self._session.__exit__(*((None, None, None) if _exit_code(error) == 0 else (kind, error, trace)))

    def open(self) -> None:
        """Called when torch is there. An option with a wrong value ends the script; what else fails leaves it alone."""
        try:
            self._session = self._row.session(**self._options).__enter__()
            if self._ranks_count > 1:
                self._meeting = Meeting(self._row, meeting_place(self._rank), self._rank, self._ranks_count, self._began_s)
                stand, every_s = self._meeting.stand, sign_every_s(self._ranks_count)
                self._stack.enter_context(Sampler(stand, name="rank", every_s=every_s, first_s=0.05))
        except TorchDebugError as wrong:
            message = f"{self._row.name}: {wrong}"
            raise SystemExit(message) from None
        except Exception as failure:  # noqa: BLE001 - as it says above
            self._outputs.say(f"not everything is watched: {type(failure).__name__}: {failure}")

    def traceback_of(self, error: BaseException) -> list[str]:
        """The session's own lines in place of a traceback, where it has interrupted the script."""
        return [] if self._session is None else self._session.traceback_of(error)

    def finish(self, error: BaseException | None, /, **ended: Any) -> None:
        """Make the report, and show it; what fails here is a line, never the script's error. `ended` is what is known of its end."""
        self._is_finishing = True
        exit_code = _exit_code(error)
        error = None if exit_code == 0 else error
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        try:
            if self._session is not None:
                report: Report | None = self._session.report
                assert report is not None
                self._outputs.own(report, self._rank)
                self._stack.close()  # it stands nowhere any more when its record is left, and when all is removed
                if self._meeting is not None:
                    report = self._meeting.merged(report, error, is_hurried=error is not None, **{"exit_code": exit_code, **ended})
                if report is not None and self._rank == 0:
                    self._outputs.of_all(report)
            elif self._rank == 0 and error is None:
                self._outputs.say("the script did not import torch: nothing was watched")
        except Exception as failure:  # noqa: BLE001 - as it says above
            self._outputs.say(f"no report could be made: {type(failure).__name__}: {failure}")
        finally:
            self._stack.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _told_to_end(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM, by a launcher or a scheduler: the report is made, and the process ends by that signal, as it would have done."""
        if self.is_here and self._is_finishing:
            return  # in a moment it has ended
        signal.signal(number, signal.SIG_DFL)
        if self.is_here:
            end = threading.Timer(_ENDING_S, os.kill, (self._owner, number))
            end.daemon = True
            end.start()
            line = user_frame(frame)
            error = Terminated()
            with contextlib.suppress(Exception):
                self.__exit__(Terminated, error, None)
                self.finish(error, state="died", exit_code=-number, error="", location=None if line is None else locate(line))
        os.kill(os.getpid(), number)


def _exit_code(error: BaseException | None) -> int | None:
    """Python's for what ends the script."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else 0 if error.code is None else 1


class Outputs:
    """The outputs of one run. A file with ``{rank}`` in its name is written by every rank, any other once."""

    def __init__(self, row: Instrument, json: Path | None, html: Path | None) -> None:
        self._row = row
        writers: tuple[tuple[Path | None, Callable[[Report], str]], ...] = ((json, Report.to_json), (html, self._page))
        self._files = [(path.absolute(), text_of) for path, text_of in writers if path is not None]  # the script may go to another folder

    def own(self, report: Report, rank: int) -> None:
        """Write the files of this process or, if it launched ranks, of each rank."""
        reports = {rank.rank: rank.report for rank in report.ranks} if isinstance(report, RanksReport) else {rank: report}
        for number, one in reports.items():
            if one is not None:
                self._write(one, str(number))

    def of_all(self, report: Report) -> None:
        """On the terminal, too; last, so that it is what one sees."""
        self._write(report)
        try:
            text = plain.render(self._row.page(report))
        except Exception as failure:  # noqa: BLE001 - a view that fails costs its picture, never the run
            text = f"{report.verdict}\n({self._row.name} could not show its report: {type(failure).__name__}: {failure})"
        print(f"\n{text}", file=sys.stderr, flush=True)  # noqa: T201 - a terminal is the screen

    def say(self, text: str) -> None:
        """One line on the terminal."""
        print(f"{self._row.name}: {text}", file=sys.stderr, flush=True)  # noqa: T201 - as above

    def _write(self, report: Report, rank: str = "") -> None:
        """Write the files of a rank; without one, those that all have in common."""
        for path, text_of in self._files:
            if (_RANK in path.name) == bool(rank):
                place = path.with_name(path.name.replace(_RANK, rank))
                try:
                    place.write_text(f"{text_of(report)}\n", encoding="utf-8")
                except OSError as error:
                    self.say(f"the report could not be written to {place}: {error.strerror}")

    def _page(self, report: Report) -> str:
        head = f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{self._row.name}</title></head>\n<body>'
        return f"{head}\n{markup.render(self._row.page(report))}\n</body>\n</html>"
