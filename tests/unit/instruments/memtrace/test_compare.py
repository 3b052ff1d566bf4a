"""Two reports side by side, made by hand: the verdict, the numbers, the pictures on one scale; and both doors to it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from IPython.core.error import UsageError

import torchdebug_magics
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.html import markup, plain
from torchdebug_magics.html.page import Areas, Fold, Table
from torchdebug_magics.instruments.memtrace.report import Comparison, MemtraceReport
from torchdebug_magics.instruments.memtrace.trace import Growth, Peak, Timeline
from torchdebug_magics.instruments.memtrace.view import page

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

MIB = 2**20
GIB = 2**30


def report(categories: dict[str, int], **more: Any) -> MemtraceReport:
    peak_bytes = sum(categories.values())
    peak = Peak(phase="forward", op="", location=None, by_category=categories, by_module={})
    timeline = Timeline(categories={name: (0, size, size // 2) for name, size in categories.items()}, peak=1)
    return MemtraceReport(net_bytes=0, start_bytes=0, peak_bytes=peak_bytes, peak=peak, timeline=timeline, **more)


PLAIN = report({"activation": 3 * GIB, "parameter": GIB})
CHECKPOINTED = report({"activation": GIB, "parameter": GIB, "temporary": GIB // 4})


def verdict(first: MemtraceReport, second: MemtraceReport) -> str:
    return Comparison(names=("a", "b"), reports=(first, second)).verdict


def test_the_lower_peak_comes_first_with_what_there_is_less_of():
    said = "peaks 44% lower than"
    assert verdict(PLAIN, CHECKPOINTED) == f"b {said} a: activations 1.0 GiB instead of 3.0 GiB"
    assert verdict(CHECKPOINTED, PLAIN) == f"a {said} b: activations 1.0 GiB instead of 3.0 GiB"


def test_alike_is_alike():
    assert verdict(PLAIN, replace(PLAIN, peak_bytes=PLAIN.peak_bytes + MIB)) == "a and b peak alike, at 4.0 GiB"
    assert verdict(report({}), report({})) == "a and b peak alike, at 0 B"


def test_the_one_that_grows_is_named():
    growing = Growth(bytes_per_iteration=12 * MIB, iterations_count=5, location=None, holder="losses", fix="")
    assert verdict(PLAIN, replace(PLAIN, growth=growing)).endswith("; b grows by 12.0 MiB each time, a does not")
    assert verdict(replace(PLAIN, rerun_growth=growing), PLAIN).endswith("; a grows by 12.0 MiB each time, b does not")
    assert "grows" not in verdict(replace(PLAIN, growth=growing), replace(PLAIN, growth=growing))


def test_light_reports_know_the_process_alone():
    first, second = (replace(PLAIN, is_light=True, rss_peak_bytes=size * GIB) for size in (2, 1))
    assert verdict(first, second) == "b peaks 50% lower than a in the whole process: 1.0 GiB instead of 2.0 GiB"


def test_the_numbers_of_both_and_two_pictures_on_one_scale_and_in_the_same_colours():
    shown = page(Comparison(names=("before", "after"), reports=(PLAIN, CHECKPOINTED)))
    table, pictures, _ = shown.blocks
    assert isinstance(table, Table)
    assert isinstance(pictures, Fold)
    first, second = (block for block in pictures.blocks if isinstance(block, Areas))
    assert first.top == second.top == 4 * GIB
    assert [name for name, _ in first.series] == [name for name, _ in second.series]
    text = " ".join(plain.render(shown).split())
    assert "at the peak: activations 3.0 GiB 1.0 GiB -2.0 GiB" in text
    assert "at the peak: temporaries 0 B 256.0 MiB +256.0 MiB" in text
    assert markup.render(shown).count("<img ") == 2


def test_the_function_takes_two_reports():
    found = torchdebug_magics.memtrace(PLAIN, CHECKPOINTED, compare=True)
    assert found.names == ("a", "b")
    assert found.verdict.startswith("b peaks 44% lower than a")


@pytest.mark.parametrize("values", [(PLAIN,), (PLAIN, 3), (PLAIN, PLAIN, PLAIN)])
def test_anything_else_is_refused_with_the_repair(values: tuple[object, ...]):
    with pytest.raises(TorchDebugError, match="takes two reports of %%memtrace, kept with `-o a`"):
        torchdebug_magics.memtrace(*values, compare=True)
    with pytest.raises(TorchDebugError, match="write `%memtrace --compare a b`"):
        torchdebug_magics.memtrace(*values)


def test_the_magic_calls_them_by_their_variables(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]):
    shell.user_ns |= {"plain": PLAIN, "runs": [CHECKPOINTED]}
    shell.run_cell("%memtrace --compare plain runs[0] -o both")
    assert shell.user_ns["both"].names == ("plain", "runs[0]")
    assert "runs[0] peaks 44% lower than plain: activations" in " ".join(capsys.readouterr().out.split())
    shell.run_cell("%memtrace --compare plain plain -o same")
    assert shell.user_ns["same"].names == ("a", "b")


@pytest.mark.parametrize("line", ["%%memtrace --compare\nnever = 1", "%memtrace --compare\nnever = 1", "%memtrace plain\nnever = 1"])
def test_used_in_the_wrong_way_it_says_so_and_runs_nothing(shell: InteractiveShell, line: str):
    shell.user_ns |= {"plain": PLAIN}
    result = shell.run_cell(line)
    assert isinstance(result.error_in_exec, UsageError)
    assert "`%memtrace --compare a b`" in str(result.error_in_exec)
    assert "never" not in shell.user_ns
