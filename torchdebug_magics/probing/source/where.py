"""The user's line behind a call: which frame, in which cell or file, and its text."""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
import threading
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

from torchdebug_magics.probing.source.code_owner import frames_above, is_user_code, owner
from torchdebug_magics.report import Location

_MAGIC_CALL = "get_ipython().run_cell_magic("
_TIMED = "<timed exec>"
_KEY = "TorchDebug"
"""Under which `%load_ext` keeps what is ours, beside IPython's own magics."""


def user_frame(frame: FrameType | None, *, below: FrameType | CodeType | None = None) -> FrameType | None:
    """The innermost frame of the user's own code, stopping before `below`: a frame, or any that runs this code."""
    for inner in frames_above(frame):
        if inner is below or inner.f_code is below:
            return None
        if owner(inner.f_code.co_filename) == "user":
            return inner
    return None


def user_calls(frame: FrameType | None) -> list[Location]:
    """Where the user's own frames stand, the outermost first."""
    return [locate(frame) for frame in frames_above(frame) if is_user_code(frame.f_code)][::-1]


def runs_alone() -> bool:
    """Whether no other thread is in the user's code."""
    here = threading.get_ident()
    others = (frame for thread, frame in sys._current_frames().items() if thread != here)
    return not any(is_user_code(frame.f_code) for frame in others for frame in frames_above(frame))


def locate(frame: FrameType) -> Location:
    """Where a frame stands now."""
    line = frame.f_lineno or frame.f_code.co_firstlineno
    return location(frame.f_code.co_filename, line, frame.f_code.co_name)


def location(filename: str, line: int, function: str) -> Location:
    """A line of a file or cell as a `Location`."""
    source = linecache.getline(filename, line).strip()
    return Location(cell=_cell_number(filename), file=filename, line=line, function=function, source=source)


def excerpt(where: Location, *, around: int = 2) -> tuple[tuple[int, str], ...]:
    """The line with its neighbours, numbered."""
    lines = linecache.getlines(where.file)
    first, last = max(1, where.line - around), min(len(lines), where.line + around)
    return tuple((number, _as_typed(lines[number - 1].rstrip("\n"))) for number in range(first, last + 1))


def _as_typed(line: str) -> str:
    """A magic line reads as it was typed, not as the call that was made of it."""
    if not line.startswith(_MAGIC_CALL) or not line.endswith(")"):
        return line
    try:
        name, arguments, body = ast.literal_eval(line.removeprefix(_MAGIC_CALL.removesuffix("(")))
    except (ValueError, SyntaxError, TypeError):  # written by the user, or not the call that we make
        return line
    return f"%%{name} {arguments}".rstrip() if body is None else line


def adopt_timed(frames: Iterable[FrameType]) -> None:
    """Make the source of a body under ``%%time`` known: IPython compiles it under a name that has none."""
    for frame in frames:
        if frame.f_code.co_filename == _TIMED and frame.f_back is not None:
            source = frame.f_back.f_locals.get("expr")
            if isinstance(source, str):
                linecache.cache[_TIMED] = (len(source), None, source.splitlines(keepends=True), _TIMED)


def span(code: CodeType, instruction: int) -> tuple[int, int, int, int] | None:
    """(line, column, end line, end column) of the instruction at a byte offset; None where unknown."""
    if instruction < 0:
        return None
    for index, (line, end_line, column, end_column) in enumerate(code.co_positions()):
        if index == instruction // 2:
            if line is None or end_line is None or column is None or end_column is None:
                return None
            return line, column, end_line, end_column
    return None


def part_of_line(text: str, line: int, place: tuple[int, int, int, int]) -> tuple[int, int] | None:
    """The part of a line that a `span` covers, as (start, end) in the stripped text; None where it covers all of it or begins elsewhere.

    Columns of code objects count bytes of UTF-8; the result counts characters.
    """
    first_line, first, last_line, last = place
    encoded, source = text.encode(), text.strip()
    if first_line != line or not source:
        return None
    indent = len(text) - len(text.lstrip())
    start = len(encoded[:first].decode(errors="replace")) - indent
    end = len(encoded[:last].decode(errors="replace")) - indent if last_line == line else len(source)
    return (start, end) if 0 <= start < end <= len(source) and (start, end) != (0, len(source)) else None


def _cell_number(filename: str) -> int | None:
    """Asked of the shell that runs."""
    running = running_shell()
    compiler = getattr(running, "compile", None)
    number = getattr(compiler, "_filename_map", {}).get(filename)
    return number if isinstance(number, int) else _number_in_history(running, filename)


def _number_in_history(shell: Any, filename: str) -> int | None:
    """IPython 7 keeps no table of names: the name of each input so far is worked out again, the latest first."""
    history = getattr(getattr(shell, "history_manager", None), "input_hist_raw", ())
    name_of = getattr(getattr(shell, "compile", None), "get_code_name", None)
    if name_of is None or filename not in linecache.cache:
        return None
    # `%reset` empties the history and not the counter: counted back from the cell that runs, the last one.
    first = shell.execution_count - len(history) + 1
    places = range(len(history) - 1, 0, -1)
    return next((first + place for place in places if name_of(history[place], history[place], first + place) == filename), None)


def running_shell() -> Any | None:
    """The shell, which puts `get_ipython` among the builtins of its cells; None where there is none."""
    asked = getattr(builtins, "get_ipython", None)
    if asked is None and "IPython" in sys.modules:
        asked = getattr(sys.modules["IPython"], "get_ipython", None)
    return asked() if asked is not None else None


def our_extension(shell: Any | None) -> Any | None:
    """What `%load_ext torchdebug_magics` put into a shell, which pins what its last session kept; None where it is not loaded."""
    return getattr(getattr(shell, "magics_manager", None), "registry", {}).get(_KEY)
