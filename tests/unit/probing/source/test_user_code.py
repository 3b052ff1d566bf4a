from __future__ import annotations

import builtins
import json
import linecache
import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchdebug_magics
from torchdebug_magics.probing.source.user_code import excerpt, is_user_code, locate, location, owner, part_of_line, span, user_frame
from torchdebug_magics.report import Location

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cell() -> Iterator[Any]:
    names: list[str] = []

    def make(name: str, text: str) -> str:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        names.append(name)
        return name

    yield make
    for name in names:
        linecache.cache.pop(name, None)


def frame_here() -> FrameType:
    return sys._getframe(1)


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        (torch.nn.__file__, "torch"),
        (torchdebug_magics.__file__, "own"),
        (json.__file__, "python"),
        ("/usr/lib/python3/dist-packages/thing.py", "library"),
        ("C:\\env\\Lib\\site-packages\\thing.py", "library"),
        ("<frozen importlib._bootstrap>", "python"),
        ("/home/me/train.py", "user"),
        ("<ipython-input-3-abc>", "user"),
        ("/tmp/ipykernel_17/123.py", "user"),
        ("<string>", "user"),
        (__file__, "user"),
    ],
)
def test_whose_a_file_is(file: str, whose: str) -> None:
    assert owner(file) == whose


def test_a_place_of_a_file() -> None:
    frame = frame_here()  # this very line
    here = locate(frame)
    assert (here.file, here.function) == (__file__, "test_a_place_of_a_file")
    assert here.cell is None
    assert here.source.startswith("here = locate(frame)")
    assert str(here).startswith("test_user_code.py:")


def test_a_place_of_a_cell(monkeypatch: pytest.MonkeyPatch, cell: Any) -> None:
    name = cell("/tmp/ipykernel_1/7.py", "a = 1\nb = a / 0\n")
    shell = SimpleNamespace(compile=SimpleNamespace(_filename_map={name: 4}))
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    found = location(name, 2, "<module>")
    assert found.cell == 4
    assert found.source == "b = a / 0"
    assert str(found) == "In[4] line 2"


def test_no_source_is_no_error() -> None:
    found = location("<nowhere>", 3, "f")
    assert found.source == ""
    assert excerpt(found) == ()


def test_the_users_frame_above_and_below_a_library() -> None:
    names: dict[str, Any] = {}
    exec(compile("def call(f):\n    return f()\n", "/x/site-packages/lib.py", "exec"), names)

    def ask() -> str:
        user = user_frame(sys._getframe(1))
        return user.f_code.co_name if user else ""

    assert names["call"](lambda: names["call"](ask)) == "<lambda>"
    assert ask() == "test_the_users_frame_above_and_below_a_library"


def test_the_search_stops_below_a_frame() -> None:
    me = frame_here()

    def inner() -> tuple[FrameType | None, FrameType | None]:
        frame = sys._getframe(0)
        return user_frame(frame, below=frame), user_frame(frame.f_back, below=me)

    assert inner() == (None, None)


def test_code_of_the_users() -> None:
    assert is_user_code(test_code_of_the_users.__code__)
    assert not is_user_code(torch.nn.Linear.forward.__code__)
    assert not is_user_code(json.dumps.__code__)


@pytest.mark.parametrize(("line", "around", "numbers"), [(1, 2, [1, 2, 3]), (3, 1, [2, 3, 4]), (5, 2, [3, 4, 5]), (3, 0, [3])])
def test_an_excerpt_is_numbered_and_ends_with_the_text(cell: Any, line: int, around: int, numbers: list[int]) -> None:
    name = cell("<five>", "".join(f"    line{number}\n" for number in range(1, 6)))
    lines = excerpt(Location(cell=None, file=name, line=line, function="f", source=""), around=around)
    assert [number for number, _ in lines] == numbers
    assert all(text == f"    line{number}" for number, text in lines)


@pytest.mark.parametrize(
    "typed",
    [
        "%%nanhunt",
        "%%nanhunt -o hunt",
        "%%nanhunt --keep-going --max-findings 3",
        "%%nanhunt --json 'my file.json'",
        '%%nanhunt --json "it\'s.json"',
        "%%nanhunt --json C:\\data\\out.json",
    ],
)
def test_an_excerpt_shows_the_magic_line_as_typed(cell: Any, typed: str) -> None:
    from torchdebug_magics.jupyter.cell import MagicLines

    read = MagicLines(["nanhunt"])([f"{typed}\n", "x = 1\n"])
    assert typed not in read[0]
    name = cell("<magic>", "".join(read))
    lines = excerpt(Location(cell=None, file=name, line=2, function="f", source="x = 1"))
    assert lines[0] == (1, typed)


def test_the_span_of_an_instruction() -> None:
    code = compile("a = 1; b = f(a)\n", "<span>", "exec")
    spans = {span(code, 2 * index) for index in range(len(code.co_code) // 2)}
    assert (1, 11, 1, 15) in spans
    assert span(code, -1) is None
    assert span(code, 10**6) is None


def test_files_with_spaces_and_other_letters(tmp_path: Path) -> None:
    file = tmp_path / "mein Modell ü.py"
    file.write_text("def f():\n    raise ValueError  # größer\n", encoding="utf-8")
    found = location(str(file), 2, "f")
    assert found.source == "raise ValueError  # größer"


@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        ("    return f(x)\n", (3, 11, 3, 15), (7, 11)),
        ("    y = 'é' + f(x)\n", (3, 15, 3, 19), (10, 14)),  # columns count bytes
        ("    y = f(\n", (3, 8, 4, 9), (4, 6)),  # the expression goes on below
        ("    f(x)\n", (3, 4, 3, 8), None),  # all of the line
        ("    f(x)\n", (2, 4, 3, 8), None),  # it begins above
        ("", (3, 4, 3, 8), None),
    ],
)
def test_the_part_of_a_line_that_an_expression_covers(text: str, place: tuple[int, int, int, int], part: tuple[int, int] | None) -> None:
    assert part_of_line(text, 3, place) == part
