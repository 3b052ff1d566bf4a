"""In a script: what the last error holds is found and freed, and what only a notebook has is said to be missing."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchdebug_magics
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.machine import process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.torch_forks import TorchForks

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_cycles_of_others() -> None:
    gc.collect()


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> Iterator[weakref.ref[Any]]:
    """The storage that the last error of the interpreter holds."""

    def fails() -> None:
        mine = torch.ones(MIB)
        refs.append(weakref.ref(mine.untyped_storage()))
        raise ValueError

    refs: list[weakref.ref[Any]] = []
    try:
        fails()
    except ValueError as error:
        trace = error.__traceback__
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        monkeypatch.setattr(sys, "last_traceback", trace.tb_next if trace else None, raising=False)
        del trace
    yield refs[0]
    for name in ("last_value", "last_traceback"):
        if not hasattr(sys, name):
            setattr(sys, name, None)  # for monkeypatch, which takes it away again


def test_to_look_frees_nothing_and_names_the_error(failed: weakref.ref[Any]) -> None:
    report = torchdebug_magics.memclean()
    (held,) = report.holdings
    assert (held.name, held.held_bytes, held.alone_bytes) == ("exception", 4 * MIB, 4 * MIB)
    assert held.what.startswith("the error of test_examine.py:")
    assert "--free exception" in report.verdict
    assert failed() is not None


def test_the_error_is_freed(failed: weakref.ref[Any]) -> None:
    report = torchdebug_magics.memclean(free="exception")
    assert failed() is None
    assert report.freed_bytes == 4 * MIB
    assert report.holdings == ()
    assert [one.name for one in report.freed] == ["cycles", "exception"]
    assert not report.problems


def test_what_is_not_asked_for_stays(failed: weakref.ref[Any]) -> None:
    report = torchdebug_magics.memclean(free="debugger,heap")
    assert failed() is not None
    assert report.freed_bytes == 0
    assert report.holdings


def test_what_a_variable_holds_too_is_not_freed_and_the_variable_is_named(failed: weakref.ref[Any]) -> None:
    mine = torch.empty(0).set_(failed())
    report = torchdebug_magics.memclean()
    assert "Nothing to gain" in report.verdict
    assert report.holdings[0].others[0].endswith("local 'mine'")
    assert torchdebug_magics.memclean(free="all").freed_bytes == 0
    assert mine.numel() == MIB


def test_outputs_are_of_a_notebook() -> None:
    report = torchdebug_magics.memclean(free="out")
    assert report.problems == ("no IPython runs here, so there are no outputs to free",)
    assert report.verdict == "Nothing was freed"


def test_the_gpu_cache_is_emptied_only_if_named_and_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        pytest.fail("emptied")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    assert "cache" not in [one.name for one in torchdebug_magics.memclean(free="all").freed]
    assert torchdebug_magics.memclean(free="cache").problems == ("CUDA is not in use in this process, so there is no GPU cache to empty",)
    assert not torch.cuda.is_initialized()


def test_what_the_gpu_cache_gives_back_is_what_was_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = {0: 3 * MIB, 1: MIB}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", reserved.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reserved.update({0: 0}))
    assert torchdebug_magics.memclean(free="cache").freed[-1].freed_bytes == 3 * MIB


def test_where_the_heap_cannot_be_trimmed_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.ctypes, "CDLL", lambda _: object())
    report = torchdebug_magics.memclean(free="heap")
    assert report.problems == ("this system's C library has no malloc_trim, so the heap was left as it is",)


@pytest.mark.parametrize("words", ["everything", "exception,gpu", "Out[x]"])
def test_an_unknown_name_frees_nothing(words: str, failed: weakref.ref[Any]) -> None:
    with pytest.raises(TorchDebugError, match="--free takes all"):
        torchdebug_magics.memclean(free=words)
    assert failed() is not None


def test_an_unknown_option_lists_the_known_one() -> None:
    with pytest.raises(TypeError, match="it has free"):
        torchdebug_magics.memclean(everything=True)


def freed_beside_a_cycle(words: str) -> Any:
    class Node:
        def __init__(self) -> None:
            self.me, self.data = self, torch.ones(MIB)

    gc.disable()
    try:
        Node()
        return torchdebug_magics.memclean(free=words)
    finally:
        gc.enable()


def test_the_cycle_that_held_what_was_freed_is_named() -> None:
    report = freed_beside_a_cycle("cycles")
    assert report.freed[0].cycle == "Node.me"
    assert report.verdict == "Freed cycles 4.0 MiB (`Node.me`)"


def test_cycles_come_first_so_that_they_are_counted_for_nobody_else(failed: weakref.ref[Any]) -> None:
    report = freed_beside_a_cycle("exception")
    assert [(one.name, one.freed_bytes) for one in report.freed] == [("cycles", 4 * MIB), ("exception", 4 * MIB)]
    assert failed() is None


def test_what_the_collector_would_free_is_said_before_it_is_asked() -> None:
    ended = []

    class Node:
        def __del__(self) -> None:
            ended.append(1)

    gc.disable()
    try:
        for _ in range(3):
            node = Node()
            node.me, node.held = node, torch.ones(MIB)  # type: ignore[attr-defined]
        ref = weakref.ref(node.held.untyped_storage())  # type: ignore[attr-defined]
        del node
        report = torchdebug_magics.memclean()
        assert report.cycles_bytes == 12 * MIB
        assert report.cycle == "Node.me"
        assert "`%memclean --free cycles` frees them" in report.verdict
        assert ref() is not None
        assert not ended
        assert torchdebug_magics.memclean(free="cycles").freed_bytes == 12 * MIB
    finally:
        gc.enable()


TRIMMED = """
import torch, torchdebug_magics
many = [torch.ones(1 << 14) for _ in range(2000)]
kept = many[-1]
del many
foretold = torchdebug_magics.memclean().heap_bytes
freed = next(one for one in torchdebug_magics.memclean(free="heap").freed if one.name == "heap")
print(foretold, freed.freed_bytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="its C library has no malloc_trim")
def test_what_the_heap_would_give_back_is_measured_in_a_copy_of_the_process(torch_forks: TorchForks) -> None:
    # In a process of its own: a heap with gaps would serve the large allocations of other tests.
    foretold, freed = map(int, torch_forks.check(TRIMMED).split())
    assert foretold > 100 * MIB
    assert abs(foretold - freed) <= 0.1 * foretold
