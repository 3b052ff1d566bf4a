"""Whether code could get at an object: a thread that stands in a function, with what the function's names lead to."""

from __future__ import annotations

import functools
import queue
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

import pytest

from torchdebug_magics.instruments.hangwatch.waits import builtin_waits
from torchdebug_magics.instruments.hangwatch.waits.builtin_waits import Reach, is_kernels
from torchdebug_magics.instruments.hangwatch.waits.thread_waits import own_frames

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

MODULE = """
import functools, queue, threading
from concurrent.futures import ThreadPoolExecutor

wanted = queue.Queue()
others = [queue.Queue() for _ in range(3)]
stand, end = threading.Event(), threading.Event()

def rest():
    stand.set()
    end.wait()

def put():
    wanted.put(1)

def put_later():
    put()

class Box:
    def __init__(self, held):
        self.held = held

    def put(self):
        put_later()

class Slots:
    __slots__ = ("held",)

def by_name():
    rest()
    wanted.put(1)

def by_functions():
    rest()
    put_later()

def by_method(box):
    rest()
    box.put()

def by_inner():
    def last():
        put()
    rest()
    last()

def with_value(value):
    rest()

def with_closure():
    kept = wanted
    def run(call=lambda: kept.put(1)):
        rest()
    run()

def with_cell():
    kept = wanted
    def run():
        rest()
        kept.put(1)
    run()

def by_module():
    rest()
    helpers.deliver()

def by_itself():
    rest()
    others[0].put(1)
"""


def standing(*, target: str, values: Any = (), space: dict[str, Any]) -> Iterator[Sequence[FrameType]]:
    thread = threading.Thread(target=space[target], args=values, daemon=True)
    thread.start()
    assert space["stand"].wait(5)
    yield own_frames(sys._current_frames()[thread.ident or 0])
    space["end"].set()
    thread.join(5)


def made(space: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    slots = space["Slots"]()
    slots.held = space["wanted"]
    return {
        "a list of lists": ([[space["wanted"]]],),
        "an attribute": (space["Box"](space["wanted"]),),
        "a slot": (slots,),
        "a bound method": (space["wanted"].put,),
        "a partial": (functools.partial(print, space["wanted"]),),
        "a timer": (threading.Timer(60, space["wanted"].put, (1,)),),
        "a key": ({space["wanted"]: 1},),
    }


@pytest.fixture
def space(tmp_path: Any) -> dict[str, Any]:
    file = tmp_path / "work.py"
    file.write_text(MODULE)
    names: dict[str, Any] = {"__name__": "work", "__builtins__": __builtins__, "__file__": str(file)}
    exec(compile(MODULE, str(file), "exec"), names)
    return names


@pytest.mark.parametrize("target", ["by_name", "by_functions", "by_inner", "with_closure", "with_cell"])
def test_what_a_function_may_come_to_use_is_reached(target: str, space: dict[str, Any]) -> None:
    for frames in standing(target=target, space=space):
        assert Reach(frames).can_get(space["wanted"])


@pytest.mark.parametrize("how", made({"Slots": type("Slots", (), {}), "Box": lambda held: held, "wanted": queue.Queue()}))
def test_what_a_value_holds_is_reached(how: str, space: dict[str, Any]) -> None:
    for frames in standing(target="with_value", values=made(space)[how], space=space):
        assert Reach(frames).can_get(space["wanted"])


def test_a_method_of_the_users_is_read_too(space: dict[str, Any]) -> None:
    for frames in standing(target="by_method", values=(space["Box"](None),), space=space):
        assert Reach(frames).can_get(space["wanted"])


def test_a_function_of_a_module_of_the_users(space: dict[str, Any]) -> None:
    helpers = types.ModuleType("helpers")
    vars(helpers).update(deliver=space["put"], other=space["by_itself"], __file__=space["__file__"])
    space["helpers"] = helpers
    for frames in standing(target="by_module", space=space):
        assert Reach(frames).can_get(space["wanted"])
        assert not Reach(frames).can_get(space["others"][1])


@pytest.mark.parametrize("values", [(), (list(range(50)),), ({"a": [1, 2]},)])
def test_what_no_name_leads_to_is_not(values: Any, space: dict[str, Any]) -> None:
    target = "with_value" if values else "by_itself"
    for frames in standing(target=target, values=values, space=space):
        reached = Reach(frames)
        assert not reached.can_get(space["wanted"])
        assert reached.can_get(space["others"][0]) == (not values)


def test_of_more_than_can_be_looked_at_nothing_is_said(space: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_waits, "_MOST_OBJECTS", 20)
    many = [[[number]] for number in range(40)]
    for frames in standing(target="with_value", values=(many,), space=space):
        assert Reach(frames).can_get(space["wanted"])


def test_nothing_of_the_users_runs(space: dict[str, Any]) -> None:
    class Alarmed:
        def __getattribute__(self, name: str) -> Any:
            pytest.fail(f"asked for {name}")

        def __eq__(self, other: object) -> bool:
            pytest.fail("compared")

        __hash__ = None  # type: ignore[assignment]

    for frames in standing(target="with_value", values=([Alarmed(), space["wanted"]],), space=space):
        assert Reach(frames).can_get(space["wanted"])


def test_the_kernels_own_code_leads_nowhere() -> None:
    assert is_kernels("ipykernel.iostream")
    assert is_kernels("IPython.core.history")
    assert not is_kernels("__main__")
