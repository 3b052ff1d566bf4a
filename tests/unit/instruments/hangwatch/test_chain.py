"""The way from the main thread to the root: to who moves, who has ended, a circle, or the last."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.instruments.hangwatch.build import World
from torchdebug_magics.instruments.hangwatch.everybody.participants import Chain, Look, Participant, follow, moving


def one(who: str, *targets: str, kind: str = "lock", **more: Any) -> Participant:
    return Participant(who, 1, kind=kind, targets=[*targets], process={"pid": 1}, **more)


def look(*everybody: Participant, at_s: float = 0.0) -> Look:
    return Look(at_s, {each.who: each for each in everybody})


WAYS = {
    "a row": ([one("main", "a"), one("a", "b"), one("b")], {}, ("main", "a", "b"), False),
    "itself": ([one("main", "main")], {}, ("main", "main"), True),
    "a circle": ([one("main", "a"), one("a", "main")], {}, ("main", "a", "main"), True),
    "a circle further on": ([one("main", "a"), one("a", "b"), one("b", "a")], {}, ("main", "a", "b", "a"), True),
    "somebody who is not there": ([one("main", "gone")], {}, ("main",), False),
    "who moves comes first": ([one("main", "a", "b"), one("a", "main"), one("b")], {"b": True}, ("main", "b"), False),
    "who ended badly comes before a circle": (
        [one("main", "a", "b"), one("a", "main"), one("b", kind="dead", exit_code=-9)], {}, ("main", "b"), False,
    ),
    "who ended well does not": (
        [one("main", "a", "b"), one("a", "a"), one("b", kind="dead", exit_code=0)], {}, ("main", "a", "a"), True,
    ),
    "who is at a debugger comes before all": (
        [one("main", "a", "b"), one("a"), one("b", kind="input", facts={"debugger": True})], {"a": True}, ("main", "b"), False,
    ),
    "who has no work comes last": (
        [one("main", "a", "b"), one("a", kind="queue", facts={"idle": True}), one("b")], {}, ("main", "b"), False,
    ),
    "the longer way": ([one("main", "a", "b"), one("a"), one("b", "c"), one("c")], {}, ("main", "b", "c"), False),
    "a way out of a circle": ([one("main", "a"), one("a", "main", "b"), one("b")], {}, ("main", "a", "b"), False),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_the_way_to_the_root(way: str) -> None:
    everybody, moved, names, is_circle = WAYS[way]
    chain = follow(look(*everybody), moved, 10.0)
    assert (chain.names, bool(chain.circle)) == (names, is_circle)
    assert chain.root.who == (names[-1] if not is_circle else names[names.index(names[-1])])


def test_the_members_of_a_circle() -> None:
    chain = follow(look(one("main", "a"), one("a", "b"), one("b", "c"), one("c", "a")), {}, 10.0)
    assert [each.who for each in chain.circle] == ["a", "b", "c"]
    assert Chain((one("main"),)).root.who == "main"


def test_many_who_all_wait_for_all_are_followed_in_time() -> None:
    import time

    names = ["main", *(f"t{number}" for number in range(9))]
    everybody = [one(who, *(other for other in names if other != who)) for who in names]
    begun_s = time.monotonic()
    chain = follow(look(*everybody), {}, 10.0)
    assert time.monotonic() - begun_s < 0.5, "every way was tried: with twelve it takes hours"
    assert chain.path[0].who == "main"


MOVES = {
    "nothing": ({}, {}, False),
    "another instruction": ({"at": (1,)}, {"at": (2,)}, True),
    "time of a thread that waits": ({"cpu_s": 1.0, "facts": {"is_waiting": True}}, {"cpu_s": 1.1, "facts": {"is_waiting": True}}, True),
    "hardly any": ({"cpu_s": 1.0, "facts": {"is_waiting": True}}, {"cpu_s": 1.02, "facts": {"is_waiting": True}}, False),
    "time of a process": ({"cpu_s": 1.0}, {"cpu_s": 1.1}, False),
    "much time of a process": ({"cpu_s": 1.0}, {"cpu_s": 1.3}, True),
}


@pytest.mark.parametrize("case", MOVES)
def test_who_moves_between_two_looks(case: str) -> None:
    before, after, moves = MOVES[case]
    assert moving([look(one("main", **before), at_s=0.0), look(one("main", **after), at_s=1.0)]) == {"main": moves}


def test_who_came_between_two_looks_has_not_moved_yet() -> None:
    looks = [look(one("main")), look(one("main"), one("new", at=(3,), cpu_s=5.0), at_s=1.0)]
    assert moving(looks) == {"main": False, "new": False}


@pytest.mark.parametrize(("starved_s", "moves"), [(0.0, False), (0.9, True)])
def test_a_thread_that_gets_no_core_is_not_stuck(monkeypatch: pytest.MonkeyPatch, starved_s: float, moves: bool) -> None:
    world = World(monkeypatch)
    before = world.look(0.0)
    world.starved_s = starved_s
    assert moving([before, world.look(1.0)])["main"] is moves
