"""Comprehensions inside a frame: none of their lines is one of that frame, and nobody looks at its names meanwhile."""

from __future__ import annotations

import ast
import asyncio
import sys
from types import FrameType, FunctionType
from typing import Any

from torchdebug_magics.probing.source.user_code import is_in_comprehension, is_of_module

CELL = """
numbers = [1, 2, 3]
doubled = [number * 2
           for number in numbers]
table = {key: [value for value in doubled] for key in numbers}
for number in numbers: last = number
lengths = [len(doubled) for _ in numbers]
async def counting():
    for number in range(2): yield number
async def given(number): return number
awaited = [await given(number) async for number in counting()] + [await given(number) for number in numbers if number > 1]
try:
    failed = [1 / (2 - number) for number in numbers]
except ZeroDivisionError:
    pass
pairs = {(one, two) for one in numbers for two in [one] if (seen := one)}
def inner(more):
    return sum(number for number in [more + one for one in numbers])
total = inner(1)
failed = [1 / (2 - number) for number in numbers]
"""
ONCE = (2, 5, 7, 8, 10, 13, 14, 15, 16, 19, 20)
"""Lines of the cell that run once, comprehensions and all."""


class Traced:
    """Looks at the names of each frame of the cell, at each line that is no comprehension's."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self.passed_count = 0

    def __call__(self, frame: FrameType, event: str, _arg: object) -> Any:
        if frame.f_code.co_filename != "<cell>":
            return None
        if event in {"line", "return"} and is_in_comprehension(frame):
            self.passed_count += 1
        elif event == "line" and frame.f_code.co_name == "<module>":
            self.lines.append(frame.f_lineno)
            assert is_of_module(frame)
            assert frame.f_locals.keys() == frame.f_globals.keys()
        elif event in {"line", "return"}:
            assert frame.f_code.co_name == "<module>" or not is_of_module(frame)
            assert "number" not in frame.f_locals or frame.f_locals["number"] is not None
        return self


def run(trace: Any) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "cell"}
    cell = FunctionType(compile(CELL, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)

    async def body() -> None:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            await cell()
        except ZeroDivisionError:
            pass
        finally:
            sys.settrace(before)

    asyncio.run(body())
    return {name: value for name, value in names.items() if isinstance(value, (int, list, dict, set))}


def test_a_cell_that_is_looked_at_runs_as_one_that_is_not() -> None:
    trace = Traced()
    assert run(trace) == run(None)
    assert [trace.lines.count(line) for line in ONCE] == [1] * len(ONCE)
    assert (trace.passed_count > 0) == (sys.version_info >= (3, 12))
