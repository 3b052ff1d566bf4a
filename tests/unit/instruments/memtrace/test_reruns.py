"""A cell that is run again and again: what each run leaves is found from the third on, and a variable that is bound anew is not."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

MIB = 2**20
SETUP = """\
import torch
kept, by_key, nets = [], {}, []
class Cyclic:
    def __init__(self, size):
        self.data, self.me = torch.ones(size), self
def fill(store):
    store.append(torch.ones(1 << 18))
net = torch.nn.Linear(256, 256)
optimizer = torch.optim.Adam(net.parameters())
"""
LEAKS = {
    "a list": ("kept.append(torch.ones(1 << 18));", MIB, "kept"),
    "the outputs": ("torch.ones(1 << 18)", MIB, "Out"),
    "a hook": ("net.register_forward_hook(lambda *_, extra=torch.ones(1 << 18): None);", MIB, "net._forward_hooks"),
}
QUIET = {
    "bound anew": "x = torch.ones(1 << 18)",
    "bound anew, larger each time": "n = globals().get('n', 0) + (1 << 18)\nx = torch.ones(n)",
}


def reports(shell: InteractiveShell, body: str, times: int, flags: str = "") -> list[Any]:
    shell.run_cell(SETUP, store_history=True)
    found = []
    for _ in range(times):
        shell.run_cell(f"%%memtrace {flags} -q -o report\n{body}", store_history=True)
        found.append(shell.user_ns["report"])
    return found


@pytest.mark.parametrize("name", LEAKS)
def test_what_each_run_leaves_is_found_at_the_third_with_who_keeps_it(shell: InteractiveShell, name: str):
    body, size_bytes, holder = LEAKS[name]
    first, second, third = reports(shell, body, 3)
    assert (first.rerun_growth, second.rerun_growth) == (None, None)
    assert third.problems == ()
    growth = third.rerun_growth
    assert (growth.bytes_per_iteration, growth.iterations_count, growth.holder) == (size_bytes, 3, holder)
    assert third.verdict.startswith("Each run of this cell adds ")
    assert f"kept by: `{holder}`" in third.verdict


@pytest.mark.parametrize("name", QUIET)
def test_what_is_bound_anew_is_no_growth(shell: InteractiveShell, name: str):
    assert [report.rerun_growth for report in reports(shell, QUIET[name], 4)] == [None] * 4


def test_the_line_is_the_one_of_the_latest_run(shell: InteractiveShell):
    growth = reports(shell, "\nkept.append(torch.ones(1 << 18))", 3)[-1].rerun_growth
    assert (growth.location.cell, growth.location.line) == (shell.execution_count - 1, 3)


def test_without_a_trace_the_holder_is_known_all_the_same(shell: InteractiveShell):
    growth = reports(shell, LEAKS["a list"][0], 3, "--light")[-1].rerun_growth
    assert (growth.bytes_per_iteration, growth.holder, growth.location) == (MIB, "kept", None)


def test_another_cell_or_a_list_that_was_emptied_begins_anew(shell: InteractiveShell):
    body = LEAKS["a list"][0]
    reports(shell, body, 2)
    shell.run_cell("kept.clear()")
    shell.run_cell(f"%%memtrace -q -o report\n{body}")
    assert shell.user_ns["report"].rerun_growth is None
    shell.run_cell(f"%%memtrace -q -o report\n{body}  # another")
    assert shell.user_ns["report"].rerun_growth is None


def test_nothing_is_kept_alive_by_remembering(shell: InteractiveShell):
    reports(shell, LEAKS["a list"][0], 3)
    storages = [weakref.ref(one.untyped_storage()) for one in shell.user_ns["kept"]]
    shell.user_ns["kept"].clear()
    gc.collect()
    assert [one() for one in storages] == [None, None, None]


def test_a_script_has_no_runs():
    import torchdebug_magics

    kept = []
    for _ in range(4):
        with torchdebug_magics.memtrace() as session:
            kept.append(torch.ones(1 << 18))
        assert session.report.rerun_growth is None
