"""Which expression a frame is in, and what its names stand for, without running a line of the user's."""

from __future__ import annotations

import ast
import linecache
import sys
import types
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from torchdebug_magics.probing.source.call_sites import MISSING, calls_on_line, function_node, names_of, node_at, value_of
from torchdebug_magics.probing.source.syntax import enclosing

if TYPE_CHECKING:
    from typing import Self

SEEN: list[str | None] = []


def look(*_: object, **__: object) -> int:
    """What the caller's frame is said to evaluate."""
    node = node_at(sys._getframe(1))
    SEEN.append(None if node is None else ast.unparse(node))
    return 1


def same(value: object, *_: object) -> object:
    return value


class Entered:
    """Looks while it is entered, and while it is left."""

    def __enter__(self) -> Self:
        node = node_at(sys._getframe(1))
        SEEN.append(None if node is None else ast.unparse(node))
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Box:
    look = staticmethod(look)


class Operand:
    def __add__(self, other: object) -> int:
        return look_two_up()

    def __getitem__(self, key: object) -> int:
        return look_two_up()


def look_two_up() -> int:
    node = node_at(sys._getframe(2))
    SEEN.append(None if node is None else ast.unparse(node))
    return 1


CALLS = {
    "look()": ["look()"],
    "x = look(3)": ["look(3)"],
    "same(look())": ["look()"],
    "same(look(), look(2))": ["look()", "look(2)"],
    "look(same(1))": ["look(same(1))"],
    "look() + look(2)": ["look()", "look(2)"],
    "box.look()": ["box.look()"],
    "[look(i) for i in range(2)]": ["look(i)", "look(i)"],
    "(lambda: look(9))()": ["look(9)"],
    "same(\n    1,\n    look(\n        2\n    ),\n)": ["look(2)"],
    "look(\n    1,\n    2,\n)": ["look(1, 2)"],
    "if look(): pass": ["look()"],
    "while look(2) != 1: pass": ["look(2)"],
    "operand + 1": ["operand + 1"],
    "operand[0]": ["operand[0]"],
    "f'{look()}'": ["look()"],
    "look(*[1], **{})": ["look(*[1], **{})"],
}
OPENED = {
    "with Entered(): pass": ["Entered()"],
    "with held: pass": ["held"],
    "with held as x: pass": ["held"],
    "with held, other: pass": ["held", "other"],
    "with (held as x, Entered() as y): pass": ["held", "Entered()"],
    "with box.held: pass": ["box.held"],
    "with held:\n    with other:\n        look(1)": ["held", "other", "look(1)"],
    "with held:\n    look(3)": ["held", "look(3)"],
}


def ran(code: str, folder: Path, *, in_function: bool = False) -> list[str | None]:
    SEEN.clear()
    box = Box()
    box.held = Entered()  # type: ignore[attr-defined]
    names = {"look": look, "same": same, "box": box, "operand": Operand(), "Entered": Entered, "held": Entered(), "other": Entered()}
    if in_function:
        code = "def function():\n" + "\n".join(f"    {line}" for line in code.splitlines()) + "\nfunction()"
    file = folder / f"code_{abs(hash((code, in_function)))}.py"
    file.write_text(code)
    exec(compile(code, str(file), "exec"), names)
    return [*SEEN]


@pytest.mark.parametrize("in_function", [False, True], ids=["module", "function"])
@pytest.mark.parametrize("code", [*CALLS, *OPENED])
def test_what_a_frame_evaluates(code: str, tmp_path: Path, *, in_function: bool) -> None:
    assert ran(code, tmp_path, in_function=in_function) == {**CALLS, **OPENED}[code]


def test_all_calls_of_a_line(tmp_path: Path) -> None:
    found: list[list[str]] = []
    file = tmp_path / "line.py"
    file.write_text("x = 1\nsame(note(), [same(2)])")
    note = lambda: found.append([ast.unparse(node) for node in calls_on_line(sys._getframe(1))])  # noqa: E731
    exec(compile(file.read_text(), str(file), "exec"), {"same": same, "note": note})
    assert sorted(found[0]) == ["note()", "same(2)", "same(note(), [same(2)])"]


@pytest.mark.parametrize("source", [None, "this is ( no Python", ""])
def test_without_source_nothing_is_said(source: str | None, tmp_path: Path) -> None:
    file = tmp_path / "gone.py"
    code = compile("look()", str(file), "exec")
    if source is not None:
        file.write_text(source)
    SEEN.clear()
    exec(code, {"look": look})
    assert SEEN == [None]


def test_a_file_that_has_changed_since_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "changed.py"
    for code in ("look(1)", "x = 1\nlook(2)"):
        file.write_text(code)
        linecache.checkcache(str(file))
        SEEN.clear()
        exec(compile(code, str(file), "exec"), {"look": look})
        assert [code.splitlines()[-1]] == SEEN


def test_a_file_that_has_changed_and_is_as_long_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "changed.py"
    for code in ("look(1)", "look(2)"):  # as a cell under `%%time` is, whose name is always the same
        file.write_text(code)
        linecache.cache[str(file)] = (len(code), None, [code], str(file))
        SEEN.clear()
        exec(compile(code, str(file), "exec"), {"look": look})
        assert [code] == SEEN
    del linecache.cache[str(file)]


# What a name stands for ----------------------------------------------------------------------------------------------


class Alarmed:
    """Whatever of it runs is noted."""

    ran: list[str] = []  # noqa: RUF012 - of the class on purpose
    plain_class_value = 5

    def __init__(self) -> None:
        self.held = "held"

    @property
    def computed(self) -> int:
        Alarmed.ran.append("property")
        return 1

    def __getattr__(self, name: str) -> int:
        Alarmed.ran.append(f"__getattr__ {name}")
        return 2

    def __getitem__(self, key: object) -> int:
        Alarmed.ran.append("__getitem__")
        return 3

    def method(self) -> None:
        Alarmed.ran.append("method")


class AlarmedAll:
    """Also its most general way in."""

    def __getattribute__(self, name: str) -> Any:
        Alarmed.ran.append(f"__getattribute__ {name}")
        return object.__getattribute__(self, name)


class AlarmedDict(dict[str, int]):
    def __getitem__(self, key: str) -> int:
        Alarmed.ran.append("dict's __getitem__")
        return 4


class AlarmedKey:
    def __hash__(self) -> int:
        Alarmed.ran.append("__hash__")
        return 1

    def __eq__(self, other: object) -> bool:
        Alarmed.ran.append("__eq__")
        return self is other


class AlarmedNumber(int):
    def __add__(self, other: int) -> int:
        Alarmed.ran.append("__add__")
        return 1

    def __neg__(self) -> int:
        Alarmed.ran.append("__neg__")
        return 1


class Descriptor:
    def __get__(self, *_: object) -> int:
        Alarmed.ran.append("__get__")
        return 6


class Slotted:
    __slots__ = ("held", "never")
    by_descriptor = Descriptor()

    def __init__(self) -> None:
        self.held = "in a slot"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def __getattr__(self, name: str) -> Any:
        Alarmed.ran.append(f"module's __getattr__ {name}")
        return super().__getattr__(name)


def value(expression: str, **names: object) -> Any:
    Alarmed.ran.clear()
    node = ast.parse(expression, mode="eval").body
    if isinstance(names.get("key"), AlarmedKey):
        names["table"] = {names["key"]: "found"}
        Alarmed.ran.clear()
    return value_of(node, sys._getframe(), names)


KNOWN = {
    "x": 7,
    "-3": -3,
    "'text'": "text",
    "len": len,
    "alarmed.held": "held",
    "alarmed.plain_class_value": 5,
    "items[1]": "b",
    "items[-1]": "c",
    "table['key']": "value",
    "table['key'][0]": MISSING,
    "slotted.held": "in a slot",
    "module.thing": "of a module",
    "Alarmed.plain_class_value": 5,
    "model.layer": "the layer",
}
UNKNOWN = (
    "nowhere", "alarmed.computed", "alarmed.other", "alarmed[0]", "all.anything", "own['a']", "own.a", "slotted.by_descriptor",
    "slotted.never", "items[9]", "table['no']", "x()", "number + 1", "module.gone", "nothing.at.all", "x if x else 1", "-number",
)  # fmt: skip


@pytest.fixture
def names() -> dict[str, Any]:
    module = types.ModuleType("made")
    module.thing = "of a module"  # type: ignore[attr-defined]
    module.__getattr__ = lambda name: Alarmed.ran.append(f"module {name}")  # type: ignore[method-assign]
    return {
        "x": 7, "alarmed": Alarmed(), "all": AlarmedAll(), "own": AlarmedDict(a=1), "items": ["a", "b", "c"],
        "table": {"key": "value"}, "slotted": Slotted(), "module": module, "Alarmed": Alarmed, "model": Model(),
        "number": AlarmedNumber(3), "user_dict": UserDict(a=1),
    }  # fmt: skip


@pytest.mark.parametrize("expression", KNOWN)
def test_what_can_be_had_by_looking(expression: str, names: dict[str, Any]) -> None:
    wanted = vars(names["model"])["_modules"]["layer"] if expression == "model.layer" else KNOWN[expression]
    assert value(expression, **names) == wanted
    assert Alarmed.ran == []


@pytest.mark.parametrize("expression", UNKNOWN)
def test_what_would_have_to_run_is_missing(expression: str, names: dict[str, Any]) -> None:
    found = value(expression, **names)
    assert Alarmed.ran == []
    assert found is MISSING


def test_a_key_of_the_users_own_is_not_hashed() -> None:
    assert value("table[key]", key=AlarmedKey()) is MISSING
    assert Alarmed.ran == []


def test_a_method_is_bound_and_not_called(names: dict[str, Any]) -> None:
    assert value("alarmed.method", **names) == names["alarmed"].method
    assert Alarmed.ran == []


def seen_from_aside(name: str) -> tuple[Any, dict[str, Any]]:
    """What a name stands for in the caller, and the caller's names, told in another thread."""
    frame: Any = sys._getframe(1)
    node = ast.parse(name, mode="eval").body
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(value_of, node, frame).result(), aside.submit(names_of, frame).result()


def test_locals_come_before_globals_and_builtins() -> None:
    def with_local() -> Any:
        len = "a local name"  # noqa: A001
        return seen_from_aside("len"), len

    assert with_local()[0][0] == "a local name"
    assert seen_from_aside("len")[0] is len


def test_the_names_of_a_function_and_of_a_module(tmp_path: Path) -> None:
    def with_local(local: int) -> Any:
        return seen_from_aside("local"), local

    assert with_local(3)[0] == (3, {"local": 3})
    space: dict[str, Any] = {"aside": seen_from_aside}
    exec(compile("found = aside('found')", str(tmp_path / "m.py"), "exec"), space)
    assert space["found"] == (MISSING, space)


def test_a_method_with_the_name_of_a_builtin_reads_no_locals() -> None:
    def evaluated(model: nn.Module) -> Any:
        model.eval()
        return seen_from_aside("model")

    model = nn.Linear(1, 1)
    assert evaluated(model)[0] is model


def test_a_function_that_holds_its_own_locals_is_left_alone() -> None:
    def with_locals(local: int) -> Any:
        held = locals()
        held["local"] = "changed by the user"
        return seen_from_aside("local"), local, held["local"]

    found, local, held = with_locals(3)
    assert (local, held) == (3, "changed by the user")
    assert found[0] in {MISSING, 3}


def test_names_are_left_alone_where_a_look_would_disturb_them() -> None:
    found: list[dict[str, Any]] = []

    def traced() -> int:
        local = 1
        found.append(names_of(sys._getframe()))
        local += 1
        return local

    before = sys.gettrace()
    sys.settrace(lambda *_: lambda *_: None)
    try:
        assert traced() == 2
    finally:
        sys.settrace(before)
    assert found == [{}]


def test_a_look_keeps_nothing_alive() -> None:
    import weakref

    class Thing:
        pass

    gone: list[weakref.ref[Thing]] = []

    def function() -> bool:
        thing = Thing()
        gone.append(weakref.ref(thing))
        names_of(sys._getframe())
        del thing
        return gone[0]() is None

    assert function()


# The function and the statements around -------------------------------------------------------------------------------


SOURCE = """
import functools

@functools.cache
def decorated():
    return 1

class A:
    def same(self):
        for i in range(3):
            with open("x") as f:
                if i:
                    pass

def same():
    try:
        pass
    except ValueError:
        while True:
            pass
"""


def test_the_node_of_a_function(tmp_path: Path) -> None:
    file = tmp_path / "functions.py"
    file.write_text(SOURCE)
    space: dict[str, Any] = {}
    exec(compile(SOURCE, str(file), "exec"), space)

    def first_line(function: Any) -> int:
        node = function_node(function.__code__)
        assert isinstance(node, ast.FunctionDef)
        return node.lineno

    assert first_line(space["decorated"].__wrapped__) == 5
    assert (first_line(space["A"].same), first_line(space["same"])) == (9, 15)
    assert function_node(compile("f = lambda: 1", str(tmp_path / "none.py"), "exec")) is None


@pytest.mark.parametrize(
    ("line", "kinds"),
    [(12, ["ClassDef", "FunctionDef", "For", "With", "If"]), (20, ["FunctionDef", "Try", "While", "Pass"]), (99, [])],
)
def test_the_statements_around_a_line(line: int, kinds: list[str]) -> None:
    assert [type(one).__name__ for one in enclosing(ast.parse(SOURCE), line)][: len(kinds)] == kinds
