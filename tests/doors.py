"""The two doors to an instrument: its function, and its magic in an in-process IPython."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from types import CodeType

    from IPython.core.interactiveshell import InteractiveShell

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
KEYWORD = re.compile(r"([a-z_]\w*)=(?!=)")
DOORS = ("function", "magic")


@dataclass
class Observed:
    """What a user has in hand after the body has run under an instrument."""

    report: Any
    error: BaseException | None
    namespace: dict[str, Any]
    door: str
    printed: str = field(default="", repr=False)


class Observe(Protocol):
    """Run `body` under the instrument `name`, through one of the doors; line 1 of the body is line 2 of the cell or file."""

    def __call__(self, name: str, body: str, *, namespace: Mapping[str, Any] | None = None, **options: object) -> Observed: ...


class Door(Observe, Protocol):
    """A door that also runs cells without an instrument, in one namespace, and examines objects in it."""

    def plain(self, body: str) -> dict[str, Any]:
        """Run a cell under a line of comment, and return the namespace of all cells."""
        ...

    def examine(self, name: str, subjects: tuple[str, ...], **options: object) -> Observed:
        """Call the instrument with these expressions, of which ``keyword=expression`` is one form."""
        ...


class FunctionDoor:
    """``with torchdebug_magics.NAME(**options) as session:`` around the body, which is run from a real file."""

    def __init__(self, folder: Path) -> None:
        self._files = (folder / f"script_{number}.py" for number in itertools.count(1))
        self._main: ModuleType | None = None
        """The script, once it has begun with a plain cell."""

    def plain(self, body: str) -> dict[str, Any]:
        file, code = self._compiled("a cell", body)
        self._main = self._main or ModuleType("__main__")
        names = vars(self._main)
        names["__file__"] = str(file)
        with self._running():
            exec(code, names)
        return names

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Make the script `__main__`, as it is for a user: else its variables would be found in the dict of a frame of the door."""
        main = sys.modules["__main__"]
        sys.modules["__main__"] = self._main or main
        try:
            yield
        finally:
            sys.modules["__main__"] = main

    def examine(self, name: str, subjects: tuple[str, ...], **options: object) -> Observed:
        import torchdebug_magics

        names = {} if self._main is None else vars(self._main)
        values, named = positional_and_named(subjects, names)
        report, error = None, None
        try:
            with self._running():
                report = getattr(torchdebug_magics, name)(*values, **named, **options)
        except BaseException as raised:
            error = raised
        return Observed(report, error, names, "function")

    def __call__(self, name: str, body: str, *, namespace: Mapping[str, Any] | None = None, **options: object) -> Observed:
        import torchdebug_magics

        file, code = self._compiled(name, body)
        names = {"__name__": "__main__"} if self._main is None else vars(self._main)
        names |= {"__file__": str(file), **(namespace or {})}
        session, error = getattr(torchdebug_magics, name)(**options), None
        try:
            with self._running(), session:
                exec(code, names)
        except BaseException as raised:
            error = raised
        return Observed(session.report, error, names, "function")

    def _compiled(self, comment: str, body: str) -> tuple[Path, CodeType]:
        file = next(self._files)
        text = f"# {comment}\n{body}"
        file.write_text(text, encoding="utf-8")
        return file, compile(text, str(file), "exec", dont_inherit=True)


class MagicDoor:
    """A cell that begins with ``%%NAME flags``, in a shell of its own."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell

    def plain(self, body: str) -> dict[str, Any]:
        self.shell.run_cell(f"# a cell\n{body}", store_history=True).raise_error()
        return self.shell.user_ns

    def examine(self, name: str, subjects: tuple[str, ...], **options: object) -> Observed:
        return self._observed(f"%{_magic(name)} {' '.join((*subjects, *_flags(options)))} -o observed_report")

    def __call__(self, name: str, body: str, *, namespace: Mapping[str, Any] | None = None, **options: object) -> Observed:
        self.shell.push(dict(namespace or {}))
        return self._observed(f"%%{_magic(name)} {' '.join(_flags(options))} -o observed_report\n{body}")

    def _observed(self, cell: str) -> Observed:
        from IPython.utils.capture import capture_output

        with capture_output() as captured:
            result = self.shell.run_cell(cell, store_history=True)
        if result.error_before_exec is not None:
            raise result.error_before_exec
        report = self.shell.user_ns.get("observed_report")
        printed = COLOUR.sub("", captured.stdout + captured.stderr)
        return Observed(report, result.error_in_exec, self.shell.user_ns, "magic", printed)


def positional_and_named(subjects: tuple[str, ...], names: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The values of expressions, apart from those that are ``keyword=expression``."""
    pairs = [(match[1], subject[match.end() :]) if (match := KEYWORD.match(subject)) else ("", subject) for subject in subjects]
    return [eval(text, names) for keyword, text in pairs if not keyword], {keyword: eval(text, names) for keyword, text in pairs if keyword}


def _magic(function: str) -> str:
    from torchdebug_magics import catalog

    return catalog.instrument(function).name


def _flags(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            yield flag
        elif value is not False:
            yield f"{flag} {value}"


@contextlib.contextmanager
def in_process_shell() -> Iterator[InteractiveShell]:
    """An IPython with the extension loaded; all that IPython changes in this process is put back.

    Tracebacks are plain: with context, each takes up to half a second of parsing and colours, and few tests read them.
    """
    import builtins

    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    displayhook, excepthook, main, known = sys.displayhook, sys.excepthook, sys.modules["__main__"], dict(vars(builtins))
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"xmode": "Plain"}}))
    try:
        shell.run_line_magic("load_ext", "torchdebug_magics")
        yield shell
        shell.run_line_magic("unload_ext", "torchdebug_magics")
    finally:
        shell.restore_sys_module_state()
        InteractiveShell.clear_instance()
        sys.displayhook, sys.excepthook, sys.modules["__main__"] = displayhook, excepthook, main
        for name in set(vars(builtins)) - set(known):
            delattr(builtins, name)
        vars(builtins).update(known)
