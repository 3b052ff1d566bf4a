from __future__ import annotations

import ast
import sys
import textwrap
from typing import Any

import pytest

from torchdebug_magics.instruments.nanhunt.rerun.attempt import frame_chain
from torchdebug_magics.instruments.nanhunt.rerun.step_recorder import live_in
from torchdebug_magics.probing.source.syntax import bound_names, lists_around, read_before_bound, tree_of
from torchdebug_magics.probing.source.user_code import local_values


def body(text: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(text)).body


@pytest.mark.parametrize(
    ("text", "free"),
    [
        ("x = 1\ny = x", set()),
        ("y = x\nx = 1", {"x"}),
        ("x += 1", {"x"}),
        ("x.n += 1", {"x"}),
        ("x[i] = y", {"x", "i", "y"}),
        ("x: int = y", {"y"}),
        ("if a:\n    b = 1\nc = b", {"a", "b"}),
        ("for i in xs:\n    s = s + i", {"xs", "s"}),
        ("for i in xs:\n    pass\ny = i", {"xs"}),
        ("with f() as g:\n    h = g\ny = h", {"f"}),
        ("try:\n    a = 1\nfinally:\n    b = a\nc = a", set()),
        ("while n:\n    n -= 1", {"n"}),
        ("def f(a):\n    return a + k\ny = f(1)", {"k"}),
        ("ys = [x * k for x in xs]", {"k", "xs"}),
        ("(y := x)\nz = y", {"x"}),
        ("a, b = b, a", {"a", "b"}),
        ("a = b = c", {"c"}),
        ("del x", set()),
        ("import os\nos.x", set()),
        ("f = lambda q: q + k", {"k"}),
        ("ys = [x for x in x]", {"x"}),
        ("try:\n    a = a + 1\nexcept E as e:\n    a = e", {"a", "E"}),
        ("def f():\n    global n\n    n += 1\nn", {"n"}),
        ("match x:\n    case [a, *b]:\n        a + b", {"x"}),
    ],
)
def test_names_whose_earlier_value_is_read(text: str, free: set[str]) -> None:
    got = read_before_bound(body(text))
    assert got - {"int"} == free


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("x = 1", {"x"}),
        ("x.n = 1\ny[0] = 2", set()),
        ("a, (b, *c) = f()", {"a", "b", "c"}),
        ("for i in xs:\n    j = i", {"i", "j"}),
        ("with f() as g:\n    pass", {"g"}),
        ("x += 1", {"x"}),
        ("del x", {"x"}),
        ("(y := 1)", {"y"}),
        ("print(x)", set()),
        ("[(y := x) for x in xs]", {"y"}),
        ("def f(a):\n    b = a", {"f"}),
        ("def f():\n    global n\n    n = 1", {"f", "n"}),
        ("class C:\n    n = 1", {"C"}),
        ("import os.path\nfrom a import b as c", {"os", "c"}),
        ("try:\n    pass\nexcept E as e:\n    pass", {"e"}),
        ("match x:\n    case {'k': a, **b}:\n        pass", {"a", "b"}),
    ],
)
def test_names_that_are_bound(text: str, names: set[str]) -> None:
    assert bound_names(*body(text)) == names


NESTED = ast.parse(
    textwrap.dedent("""\
    a = 1
    for x in xs:
        if x:
            b = f(x); c = g(b)
        else:
            d = 2
    class K:
        def m(self):
            with w:
                e = 3
    """)
)


@pytest.mark.parametrize(
    ("where", "places"),
    [
        ((1, -1, 1, -1), [0]),
        ((4, -1, 4, -1), [0, 0, 1]),
        ((4, 17, 4, 25), [0, 0, 1]),
        ((4, 21, 4, 25), [1, 0, 1]),
        ((6, -1, 6, -1), [0, 0, 1]),
        ((10, -1, 10, -1), [0, 0]),
        ((99, -1, 99, -1), []),
    ],
)
def test_the_lists_around_a_place_end_at_the_function(where: tuple[int, int, int, int], places: list[int]) -> None:
    if where[1] == 17:
        where = (4, 8, 4, 16)
    assert [place for _, place in lists_around(NESTED, where)] == places


def test_handlers_finals_and_cases_are_bodies() -> None:
    tree = ast.parse("try:\n    a\nexcept E:\n    b\nelse:\n    c\nfinally:\n    d\nmatch x:\n    case 1:\n        e\n")
    for line in (2, 4, 6, 8):
        assert len(lists_around(tree, (line, -1, line, -1))) == 2
    assert len(lists_around(tree, (11, -1, 11, -1))) == 2


def test_no_source_and_bad_source_are_none(tmp_path: Any) -> None:
    assert tree_of("<nowhere at all>") is None
    file = tmp_path / "bad.py"
    file.write_text("def (:\n")
    assert tree_of(str(file)) is None


def test_local_values_are_a_copy_and_keep_nothing() -> None:
    def inner() -> dict[str, Any]:
        here, there = 1, 2
        frame = sys._getframe(0)
        some = local_values(frame, frozenset({"here", "absent"}))
        everything = local_values(frame)
        assert (here, there) == (1, 2)
        assert {"here", "there"} <= everything.keys()
        return some

    assert inner() == {"here": 1}


def test_values_are_taken_anew_at_each_step_and_names_at_each_place() -> None:
    def run() -> list[dict[str, Any]]:
        taken = []
        state = other = 0
        for step in range(3):
            taken.append(take())
            state = state + 10 * step + 1
        taken.append(take())
        other = other + 1
        return [*taken, {"state": state, "other": other}]

    def take() -> dict[str, Any]:
        frame = sys._getframe(1)
        return dict(live_in(frame_chain(frame)).get(id(frame), {}))

    assert [{name: one[name] for name in ("state", "other") if name in one} for one in run()] == [
        {"state": 0, "other": 0},
        {"state": 1, "other": 0},
        {"state": 12, "other": 0},
        {"other": 0},
        {"state": 33, "other": 1},
    ]


def test_a_position_keeps_the_line_it_stood_at() -> None:
    frame = sys._getframe()
    here, line = frame_chain(frame)[0], frame.f_lineno
    assert (here.frame, here.line) == (frame, line)
    assert frame.f_lineno > here.line
