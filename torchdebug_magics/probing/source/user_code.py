"""The user's line behind a call: which frame, in which cell or file, and its text."""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import gc
import importlib.util
import linecache
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType, FunctionType
from typing import Any, Literal, TypeAlias

from torchdebug_magics.report import Location

_MAGIC_CALLS = {"get_ipython().run_cell_magic": "%%", "get_ipython().run_line_magic": "%"}
_TIMED = "<timed exec>"
_KEY = "TorchDebug"
"""Under which `%load_ext` keeps what is ours, beside IPython's own magics."""
Owner: TypeAlias = Literal["user", "library", "torch", "own", "python"]
_SPEC = importlib.util.find_spec("torch")
_TORCH = str(Path(_SPEC.origin).parent) if _SPEC is not None and _SPEC.origin else "<no torch>"
_OWN = str(Path(__file__).parent.parent.parent)
_PYTHON = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_SNAPSHOTS = sys.version_info < (3, 13)
"""Before, a function's `f_locals` is a dict that the frame keeps, and that keeps alive what it holds."""
_MADE_BY_TORCH = "<eval_with_key>"
"""Functions that a compiler of torch's wrote."""
_COMPILED = "/torchinductor_"
"""Folders of files that it wrote."""
_PACKAGES = ("/site-packages/", "/dist-packages/")
_PUTS_ASIDE = "LOAD_FAST_AND_CLEAR"
"""How such a comprehension begins: with the variable of the same name around it."""
_PUTS_BACK = "STORE_FAST"
_LOOPS = "FOR_ITER", "END_ASYNC_FOR"
_CODES = 512
_MOST_FUNCTIONS = 200


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
    source = _as_typed(linecache.getline(filename, line).strip())
    return Location(cell=_cell_number(filename), file=filename, line=line, function=function, source=source)


def raised_at(error: BaseException | None) -> Location | None:
    """The innermost line of the user's in its traceback."""
    walked = walk_tb(None if error is None else error.__traceback__)
    lines = [(frame.f_code, line) for frame, line in walked if is_user_code(frame.f_code)]
    return location(lines[-1][0].co_filename, lines[-1][1], lines[-1][0].co_name) if lines else None


def excerpt(where: Location, *, around: int = 2) -> tuple[tuple[int, str], ...]:
    """The line with its neighbours, numbered."""
    lines = linecache.getlines(where.file)
    first, last = max(1, where.line - around), min(len(lines), where.line + around)
    return tuple((number, _as_typed(lines[number - 1].rstrip("\n"))) for number in range(first, last + 1))


def _as_typed(line: str) -> str:
    """A magic line reads as it was typed, not as the call that was made of it."""
    typed = line.lstrip()
    call = next((call for call in _MAGIC_CALLS if typed.startswith(f"{call}(")), "")
    if not call:
        return line
    try:
        name, arguments, *body = ast.literal_eval(typed.removeprefix(call))
    except (ValueError, SyntaxError, TypeError):  # written by the user, or not the call that is made of a magic
        return line
    return f"{line[: -len(typed)]}{_MAGIC_CALLS[call]}{name} {arguments}".rstrip() if body in ([], [None]) else line


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
    return next((first + place for place in places if _name_of_cell(name_of, history[place], first + place) == filename), None)


@functools.lru_cache(maxsize=4096)
def _name_of_cell(name_of: Any, text: str, number: int) -> str:
    """Kept, as ipykernel hashes the whole text, character by character in Python."""
    return str(name_of(text, text, number))


def running_shell() -> Any | None:
    """The shell, which puts `get_ipython` among the builtins of its cells; None where there is none."""
    get_shell = getattr(builtins, "get_ipython", None)
    if get_shell is None and "IPython" in sys.modules:
        get_shell = getattr(sys.modules["IPython"], "get_ipython", None)
    return get_shell() if get_shell is not None else None


def our_extension(shell: Any | None) -> Any | None:
    """What `%load_ext torchdebug_magics` put into a shell, which pins what its last session kept; None where it is not loaded."""
    return getattr(getattr(shell, "magics_manager", None), "registry", {}).get(_KEY)


@functools.lru_cache(maxsize=4096)
def owner(filename: str) -> Owner:
    """Whose code a file is."""
    path = filename.replace("\\", "/")
    if path.startswith((_TORCH, _MADE_BY_TORCH)) or _COMPILED in path:
        return "torch"
    if path.startswith(_OWN):
        return "own"
    if any(mark in path for mark in _PACKAGES):
        return "library"
    if path.startswith(_PYTHON) or path.startswith("<frozen"):
        return "python"
    return "user"


def is_user_code(code: CodeType) -> bool:
    """Whether the code was written by the user and not installed."""
    return owner(code.co_filename) == "user"


def is_module_code(code: CodeType) -> bool:
    """Whether it is that of a module or a cell, whose names are global; IPython has called cells otherwise for a while."""
    return code.co_name == "<module>" or code.co_name.startswith("<cell line")


def frames_above(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def local_values(frame: FrameType, names: frozenset[str] | None = None) -> dict[str, Any]:
    """A frame's local variables, all or those of `names`; the frame holds nothing more than before."""
    before = gc.get_referents(frame) if _SNAPSHOTS and frame.f_code.co_flags & CO_OPTIMIZED else []
    space = frame.f_locals
    values = dict(space) if names is None else {name: space[name] for name in names if name in space}
    if _SNAPSHOTS and frame.f_code.co_flags & CO_OPTIMIZED:
        # A snapshot that nobody else has seen is emptied: we and the frame hold it. Under a tracer, it would be written back.
        is_new = not any(item is space for item in before) and sys.getrefcount(space) <= 3  # noqa: PLR2004 - here, the argument, the frame
        if is_new and frame.f_trace is None and sys.gettrace() is None and getattr(threading, "_trace_hook", None) is None:
            space.clear()
    return values


# Who traces a cell must not look at `f_locals` inside one: Python 3.12 then writes back what was seen, and the variable of the
# comprehension is lost.
def is_in_comprehension(frame: FrameType) -> bool:
    """Whether what runs is a part of one; False on Python 3.11 and earlier, where each has a frame of its own."""
    return any(frame.f_lasti in part for part in _ranges(frame.f_code))


def is_of_module(frame: FrameType) -> bool:
    """Whether its names are those of a module or a cell, and no others, save what a comprehension binds."""
    if frame.f_code.co_flags & CO_OPTIMIZED:
        return False
    names = frame.f_locals  # Python 3.12 gives a copy inside a comprehension, and after a `:=` in one
    return names is frame.f_globals or is_in_comprehension(frame) or "__name__" in names


@functools.lru_cache(_CODES)
def _ranges(code: CodeType) -> tuple[range, ...]:
    """The instructions of its comprehensions, as ranges of offsets."""
    if _PUTS_ASIDE not in dis.opmap:
        return ()
    instructions = list(dis.get_instructions(code))
    bodies = [range(instr.offset, _end(instructions[place:])) for place, instr in enumerate(instructions) if instr.opname == _PUTS_ASIDE]
    return (*bodies, *_after_errors(code, instructions, bodies))


def _end(instructions: Sequence[dis.Instruction]) -> int:
    """Behind what puts back, after the loop, the variable that the first of these puts aside."""
    name = instructions[0].argval
    loop = next(instruction for instruction in instructions if instruction.opname in _LOOPS)
    after = loop.argval if loop.opname == _LOOPS[0] else loop.offset
    return next(
        instruction.offset + 1
        for instruction in instructions
        if instruction.offset >= after and instruction.opname.startswith(_PUTS_BACK) and name in _stored(instruction)
    )


def _stored(instruction: dis.Instruction) -> tuple[str, ...]:
    """Some instructions of Python 3.13 store two."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def _after_errors(code: CodeType, instructions: Sequence[dis.Instruction], bodies: Sequence[range]) -> Iterator[range]:
    """What puts a variable back after an error; it begins without `PUSH_EXC_INFO`, as a handler of the user's would."""
    for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
        if any(entry.start in body for body in bodies):
            handler = [instruction for instruction in instructions if instruction.offset >= entry.target]
            if handler[0].opname != "PUSH_EXC_INFO":
                yield range(entry.target, next(instruction.offset for instruction in handler if instruction.opname == "RERAISE"))


@dataclass(frozen=True)
class Writes:
    """Names in one piece of code, and in the functions inside it."""

    attributes: frozenset[str]
    stored_globals: frozenset[str]
    loaded: frozenset[str]
    loaded_attributes: frozenset[str]


@functools.lru_cache(maxsize=2048)
def writes_of(code: CodeType) -> Writes:
    """What a piece of code writes and reads by name."""
    attributes, stored, loaded, loaded_attributes = set(), set(), set(), set()
    for instruction in dis.get_instructions(code):
        match instruction.opname:
            case "STORE_ATTR":
                attributes.add(instruction.argval)
            case "STORE_GLOBAL":
                stored.add(instruction.argval)
            case "LOAD_GLOBAL" | "LOAD_NAME":
                loaded.add(instruction.argval)
            case "LOAD_ATTR" | "LOAD_METHOD":
                loaded_attributes.add(instruction.argval)
            case _:
                pass
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = writes_of(constant)
            attributes |= inner.attributes
            stored |= inner.stored_globals
            loaded |= inner.loaded
            loaded_attributes |= inner.loaded_attributes
    return Writes(frozenset(attributes), frozenset(stored), frozenset(loaded), frozenset(loaded_attributes))


def called_from(function: object) -> Iterator[FunctionType]:
    """The function, if it is one and the user's, and the user's functions that it calls by name, directly or through others."""
    todo, seen = [function] if isinstance(function, FunctionType) else [], set[int]()
    while todo and len(seen) < _MOST_FUNCTIONS:
        current = todo.pop()
        if id(current.__code__) not in seen and is_user_code(current.__code__):
            seen.add(id(current.__code__))
            yield current
            names = current.__globals__
            todo += [names[name] for name in writes_of(current.__code__).loaded & names.keys() if isinstance(names[name], FunctionType)]
