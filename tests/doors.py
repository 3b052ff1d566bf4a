"""The two doors to an instrument: its function, and its magic in an in-process IPython."""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from IPython.core.interactiveshell import InteractiveShell

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
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


class FunctionDoor:
    """``with torchdebug_magics.NAME(**options) as session:`` around the body, which is run from a real file."""

    def __init__(self, folder: Path) -> None:
        self._files = (folder / f"script_{number}.py" for number in itertools.count(1))

    def __call__(self, name: str, body: str, *, namespace: Mapping[str, Any] | None = None, **options: object) -> Observed:
        import torchdebug_magics

        file = next(self._files)
        file.write_text(f"# {name}\n{body}", encoding="utf-8")
        code = compile(file.read_text(encoding="utf-8"), str(file), "exec", dont_inherit=True)
        names = {"__name__": "__main__", "__file__": str(file), **(namespace or {})}
        session, error = getattr(torchdebug_magics, name)(**options), None
        try:
            with session:
                exec(code, names)
        except BaseException as raised:
            error = raised
        return Observed(session.report, error, names, "function")


class MagicDoor:
    """A cell that begins with ``%%NAME flags``, in a shell of its own."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell

    def __call__(self, name: str, body: str, *, namespace: Mapping[str, Any] | None = None, **options: object) -> Observed:
        from IPython.utils.capture import capture_output

        self.shell.push(dict(namespace or {}))
        cell = f"%%{name} {' '.join(_flags(options))} -o observed_report\n{body}"
        with capture_output() as captured:
            result = self.shell.run_cell(cell, store_history=True)
        if result.error_before_exec is not None:
            raise result.error_before_exec
        report = self.shell.user_ns.get("observed_report")
        printed = COLOUR.sub("", captured.stdout + captured.stderr)
        return Observed(report, result.error_in_exec, self.shell.user_ns, "magic", printed)


def _flags(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            yield flag
        elif value is not False:
            yield f"{flag} {value}"


@contextlib.contextmanager
def in_process_shell() -> Iterator[InteractiveShell]:
    """An IPython with the extension loaded; all that IPython changes in this process is put back."""
    import builtins
    import sys

    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    displayhook, excepthook, main, known = sys.displayhook, sys.excepthook, sys.modules["__main__"], dict(vars(builtins))
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
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
