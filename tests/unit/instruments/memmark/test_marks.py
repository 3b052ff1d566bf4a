"""A row of memory numbers at a named moment: what is in it, and what it leaves alone."""

from __future__ import annotations

import gc
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchdebug_magics
from tests import children
from torchdebug_magics.memory.gauges import ledger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from IPython.core.interactiveshell import InteractiveShell

    from tests.nvml import FakeNvml

MIB = 2**20
GIB = 2**30


@pytest.fixture(autouse=True)
def no_marks() -> Iterator[None]:
    ledger().clear()
    yield
    ledger().clear()


def labels() -> list[str]:
    return [mark.label for mark in torchdebug_magics.memmark().marks]


def said(capsys: pytest.CaptureFixture[str], label: str) -> str:
    torchdebug_magics.memmark(label)
    return capsys.readouterr().out.strip()


@pytest.mark.waits  # what earlier tests have freed may be given back meanwhile: then it is repeated alone
def test_the_function_prints_the_row_and_keeps_it(capsys: pytest.CaptureFixture[str]):
    first = said(capsys, "before")
    assert re.match(r"before: RSS [\d.]+ [MG]iB \| the whole machine .* of .*", first)
    assert "(+" not in first
    kept = bytearray(b"x") * (100 * MIB)
    second = said(capsys, "after")
    grown = re.search(r"RSS [\d.]+ [MG]iB \(\+([\d.]+) MiB\)", second)
    assert grown is not None
    assert 95 < float(grown[1]) < 115  # what else the process does meanwhile takes some
    assert labels() == ["before", "after"]
    assert len(kept) == 100 * MIB


def test_force_false_does_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gc, "collect", lambda: 1 / 0)
    assert torchdebug_magics.memmark("x", force=False) is None
    assert capsys.readouterr().out == ""
    assert labels() == []


def test_garbage_is_collected_first():
    class Node:
        pass

    node = Node()
    node.me = node  # type: ignore[attr-defined]
    alive = [one for one in gc.get_objects() if type(one) is Node]
    assert alive
    del node, alive
    torchdebug_magics.memmark("x")
    assert not [one for one in gc.get_objects() if type(one) is Node]


def test_the_magic_and_the_function_share_a_table(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]):
    shell.run_cell('%memmark "one"')
    shell.run_cell('for step in range(2):\n    %memmark f"step {step}"\ntorchdebug_magics = __import__("torchdebug_magics")')
    shell.run_cell('torchdebug_magics.memmark("two")')
    shell.run_cell('%memmark "never" --no-force')
    capsys.readouterr()
    shell.run_cell("%memmark -o marks")
    assert [mark.label for mark in shell.user_ns["marks"].marks] == ["one", "step 0", "step 1", "two"] == labels()
    assert capsys.readouterr().out.startswith("[● note] 4 marks; RSS ")
    shell.run_cell("%memmark --clear")
    assert "No marks so far" in capsys.readouterr().out
    assert labels() == []


@pytest.mark.parametrize(
    ("line", "label"),
    [
        ("before", "before"), ("after training", "after training"), ("v1.2", "v1.2"), ("epoch-1", "epoch-1"), ("tensor", "tensor"),
        ("step {step}", "step 2"), ("before # a comment", "before"), ("before the forward --json marks.json", "before the forward"),
        ("step", "2"), ("title", "a title"), ("step * 2", "4"), ("'quoted'", "quoted"), ('f"step {step}"', "step 2"),
    ],
)  # fmt: skip
def test_words_are_the_label_and_expressions_are_evaluated(
    shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, label: str
):
    monkeypatch.chdir(tmp_path)
    shell.user_ns |= {"step": 2, "title": "a title", "tensor": torch.ones(2)}
    assert shell.run_cell(f"%memmark {line}").success
    assert labels() == [label]


def test_it_watches_no_cell(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]):
    result = shell.run_cell("%%memmark\nnever = 1")
    assert result.error_in_exec is not None
    assert "%memmark stands on a line of its own" in str(result.error_in_exec)
    assert "never" not in shell.user_ns


@pytest.mark.parametrize(("value", "rank"), [("3", 3), ("", None), ("x", None)])
def test_the_rank_of_a_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str, rank: int | None):
    monkeypatch.setenv("RANK", value)
    assert said(capsys, "x").startswith("x: " if rank is None else f"[{rank}] x: ")
    assert torchdebug_magics.memmark().marks[0].rank == rank


def test_the_rank_of_an_initialized_group(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    assert said(capsys, "x").startswith("[5] x: ")


def use_cuda(monkeypatch: pytest.MonkeyPatch, held: dict[str, int]) -> None:
    def stats(_: int) -> dict[str, Any]:
        return {f"{what}_bytes": {"all": {"current": held[what], "peak": held[f"{what} peak"]}} for what in ("allocated", "reserved")}

    def never(*_: object) -> None:
        raise AssertionError("a counter was reset")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA T4", uuid="a", total_memory=16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", never)


def test_a_gpu_in_the_words_of_the_allocator(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, capsys: pytest.CaptureFixture[str]):
    held = {"allocated": 2 * GIB, "allocated peak": 5 * GIB, "reserved": 4 * GIB, "reserved peak": 6 * GIB}
    use_cuda(monkeypatch, held)
    gpu = nvml.add(uuid="GPU-a", used_bytes=7 * GIB, processes=[(1, 7 * GIB)])
    first = said(capsys, "fwd")
    assert first.startswith("fwd: MA 2.0 GiB | Max_MA 5.0 GiB | CA 4.0 GiB | Max_CA 6.0 GiB | NV 7.0 GiB | unaccounted 3.0 GiB | RSS ")
    held |= {"allocated": 3 * GIB}
    gpu.used_bytes = 8 * GIB
    second = said(capsys, "bwd")
    assert "MA 3.0 GiB (+1.0 GiB) | Max_MA 5.0 GiB (older than the last mark) | CA 4.0 GiB (+0 B)" in second
    assert "NV 8.0 GiB (+1.0 GiB) | unaccounted 4.0 GiB (+1.0 GiB)" in second
    held |= {"allocated peak": 9 * GIB}
    assert "Max_MA 9.0 GiB | CA" in said(capsys, "step")
    assert [mark.max_is_new for mark in torchdebug_magics.memmark().marks] == [True, False, True]


def test_without_torch_it_stays_without():
    code = "import sys, torchdebug_magics\ntorchdebug_magics.memmark('x')\nassert 'torch' not in sys.modules"
    assert children.python("-c", code).startswith("x: RSS ")
