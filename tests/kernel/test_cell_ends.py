"""The session of a cell closes at that cell's end, however it ends, and its report comes last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import on_both_stacks

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel

pytestmark = on_both_stacks

OPENED_AND_CLOSED = "['open one', 'close one']"
STACKED = "['open one', 'open two', 'close two', 'close one']"

ENDS = {
    "value": ("%%one -q\n1", "ok"),
    "nothing but the magic line": ("%%one -q", "ok"),
    "error": ("%%one -q\n1 / 0", "error"),
    "exit": ("%%one -q\nraise SystemExit", "error"),
    "interrupt": ("%%one -q\nraise KeyboardInterrupt", "error"),
    "await": ("%%one -q\nimport asyncio\nawait asyncio.sleep(0.01)", "ok"),
    "await, error": ("%%one -q\nimport asyncio\nawait asyncio.sleep(0)\n1 / 0", "error"),
    "bare line": ("assert not open_now\n%one -q\nassert open_now == ['one']", "ok"),
    "bare line after a nested run_cell": ("get_ipython().run_cell('1')\n%one -q\nassert open_now == ['one']", "ok"),
    "nested run_cell inside": ("%%one -q\nget_ipython().run_cell('1')\nassert open_now == ['one']", "ok"),
    "nested run_cell with a session": ("get_ipython().run_cell('%%one -q\\n1')\nassert not open_now", "ok"),
    "%%capture below": ("%%one -q\n%%capture\nassert open_now == ['one']", "ok"),
    "%%capture above": ("%%capture\n%%one -q\nassert open_now == ['one']", "ok"),
    "%%time below": ("%%one -q\n%%time\nassert open_now == ['one']", "ok"),
    "%%time above": ("%%time\n%%one -q\nassert open_now == ['one']", "ok"),
    "indented body": ("%%one -q\n  x = 1\n  assert x", "ok"),
    "indented magic line": ("  %%one -q\n  x = 1", "ok"),
    "comment above": ("# why\n%%one -q\n1", "ok"),
    "blank lines above": ("\n\n%%one -q\n1", "ok"),
    "tab after the name": ("%%one\t-q\n1", "ok"),
    "comment on the line": ("%%one -q # don't show it\n1", "ok"),
    "a loop of nested cells": ("for _ in range(1):\n    get_ipython().run_cell('%%one -q\\n1')", "ok"),
    "another IPython thread's cell": ("%%one -q\nimport threading\nt = threading.Thread(target=print)\nt.start(); t.join()", "ok"),
}


@pytest.mark.parametrize("cell", ENDS)
def test_opened_once_and_closed(kernel: Kernel, cell: str) -> None:
    code, status = ENDS[cell]
    ran = kernel.run(code)
    assert ran.status == status, ran.text
    assert kernel.value("log") == OPENED_AND_CLOSED
    assert kernel.value("open_now") == "[]"


@pytest.mark.parametrize(
    "code",
    ["%%one -q\n%%two -q\n1", "%%one -q\n\n# note\n%%two -q\n1 / 0", "%%one -q\n%two -q\n1", "%%one -q\n%%time\n%%two -q\n1"],
    ids=["cell over cell", "comment between, error", "cell over line", "%%time between"],
)
def test_sessions_stack(kernel: Kernel, code: str) -> None:
    kernel.run(code)
    assert kernel.value("log") == STACKED


NEVER_OPENED = {
    "syntax error": ("%%one\nif x\n y", "SyntaxError"),
    "syntax error, stacked": ("%%one\n%%two\n(", "SyntaxError"),
    "unknown flag": ("%%one --bad\nprint('ran')", "UsageError"),
    "bad choice": ("%%one --fail never\nprint('ran')", "UsageError"),
    "bad name": ("%%one -o 1x\nprint('ran')", "UsageError"),
    "keyword as name": ("%%one -o class\nprint('ran')", "UsageError"),
    "missing value": ("%%one -o\nprint('ran')", "UsageError"),
    "a value that it does not take": ("%%two value\nprint('ran')", "UsageError"),
    "a value above a cell": ("%%one value\nprint('ran')", "UsageError"),
    "json in no folder": ("%%one --json no/where.json\nprint('ran')", "UsageError"),
    "open quote": ("%%one --label \"x\nprint('ran')", "UsageError"),
    "programmatic, unknown flag": ("get_ipython().run_cell_magic('one', '--bad', 'print(1)')", "UsageError"),
    "programmatic, syntax error": ("get_ipython().run_cell_magic('one', '', '(')", "SyntaxError"),
}


@pytest.mark.parametrize("cell", NEVER_OPENED)
def test_what_is_wrong_runs_nothing(kernel: Kernel, cell: str) -> None:
    code, error = NEVER_OPENED[cell]
    ran = kernel.run(code)
    assert (ran.status, ran.ename) == ("error", error)
    if error == "UsageError":
        assert ran.kinds == ["stream"], "one red line, no traceback"
        assert ran.stderr.count("\n") == 1
        assert "?" in ran.stderr or "quot" in ran.stderr, "it says the repair"
    assert ran.stdout == ""
    assert kernel.value("log") == "[]"


def test_twice_on_one_cell_is_said_and_the_first_is_closed(kernel: Kernel) -> None:
    ran = kernel.run("%%one -q\n%%one -q\nprint('ran')")
    assert (ran.ename, ran.stdout) == ("UsageError", "")
    assert "open in this cell already" in ran.stderr
    assert kernel.value("log") == OPENED_AND_CLOSED


def test_the_report_comes_after_the_traceback(kernel: Kernel) -> None:
    assert kernel.run("%%one\nprint('a')\n1 / 0").kinds == ["stream", "error", "display_data"]


def test_the_report_comes_after_the_value(kernel: Kernel) -> None:
    assert kernel.run("%%one\nprint('a')\n1").kinds == ["stream", "execute_result", "display_data"]


def test_an_error_at_the_end_fails_the_cell_and_both_close(kernel: Kernel) -> None:
    ran = kernel.run("%%one -q\n%%two -q --fail close\n1")
    assert (ran.status, ran.ename) == ("error", "TorchDebugError")
    assert "two failed at close" in ran.traceback
    assert kernel.value("open_now") == "[]"


def test_an_error_at_the_end_never_hides_the_users(kernel: Kernel) -> None:
    ran = kernel.run("%%two -q --fail close\n1 / 0")
    assert ran.ename == "ZeroDivisionError"
    assert "ZeroDivisionError" in ran.traceback
    assert ran.stderr == "%%two: TorchDebugError: two failed at close\n"


def test_an_error_while_opening_runs_nothing_and_leaves_nothing(kernel: Kernel) -> None:
    ran = kernel.run("%%two -q --fail open\nprint('ran')")
    assert (ran.status, ran.ename) == ("error", "UsageError")  # what cannot begin was asked for in the wrong way
    assert "ran" not in ran.stdout
    assert kernel.value("open_now") == "[]"


def test_an_error_while_the_report_is_frozen_fails_the_cell(kernel: Kernel) -> None:
    ran = kernel.run("%%two -q --fail report\n1")
    assert (ran.status, ran.ename) == ("error", "TorchDebugError")
    assert kernel.value("open_now") == "[]"


SLOW_FOR_EVER = """
import tests.kernel.fakes as f
kept = f.FakeProbe._trouble
f.FakeProbe._trouble = lambda self, when: f.time.sleep(20) if when == self._slow else None
"""


@pytest.mark.parametrize("when", ["open", "close"])
def test_an_interrupt_while_it_opens_or_closes(kernel: Kernel, when: str) -> None:
    if when == "open":
        code = "%%one -q --slow open\nprint('ran')"
        kernel.run(SLOW_FOR_EVER)
    else:
        code = "%%one -q --slow close\n1"
    ran = kernel.run(code, interrupt_s=0.7)
    if when == "open":
        kernel.run("f.FakeProbe._trouble = kept\ndel f, kept")
    assert ran.took_s < 2
    assert (ran.status, ran.ename, ran.stdout) == ("error", "KeyboardInterrupt", "")
    assert kernel.value("open_now") == "[]"
    assert kernel.run("%%one -q\n1").status == "ok"


@pytest.mark.parametrize("body", ["import time\ntime.sleep(20)", "while True: pass"], ids=["sleep", "busy"])
def test_an_interrupt_is_prompt_and_still_gives_the_report(kernel: Kernel, body: str) -> None:
    ran = kernel.run(f"%%one -o kept_report\n{body}", interrupt_s=0.7)
    assert ran.took_s < 2
    assert (ran.status, ran.ename) == ("error", "KeyboardInterrupt")
    assert ran.kinds == ["error", "display_data"]
    assert kernel.value("(open_now, str(kept_report))") == "([], 'verdict of one')"
    kernel.run("del kept_report")


def test_silent_cells_close_too(kernel: Kernel) -> None:
    kernel.run("%%one -q\n1", silent=True)
    assert kernel.value("log") == OPENED_AND_CLOSED


PROGRAMMATIC = {
    "value": ("get_ipython().run_cell_magic('one', '-q', 'x = 3\\nx + 1')", "4"),
    "no value": ("get_ipython().run_cell_magic('one', '-q', 'x = 3')", None),
    "%%time in the body": ("get_ipython().run_cell_magic('one', '-q', '%%time\\n6 * 7')", "42"),
    "outside a cell": (
        "import threading\nt = threading.Thread(target=get_ipython().run_cell_magic, args=('one', '-q', '1'))\nt.start(); t.join()",
        None,
    ),
}


@pytest.mark.parametrize("cell", PROGRAMMATIC)
def test_called_by_code(kernel: Kernel, cell: str) -> None:
    code, value = PROGRAMMATIC[cell]
    ran = kernel.run(code)
    assert (ran.status, ran.value) == ("ok", value)
    assert kernel.value("log") == OPENED_AND_CLOSED


def test_called_by_code_an_error_reaches_the_caller_once(kernel: Kernel) -> None:
    ran = kernel.run(
        "try:\n    get_ipython().run_cell_magic('one', '-q', 'x = 1\\n1 / 0')\nexcept ZeroDivisionError as e:\n    print('caught')"
    )
    assert (ran.stdout, ran.kinds) == ("caught\n", ["stream"])
    ran = kernel.run("try:\n    get_ipython().run_cell_magic('two', '-q --fail close', '1')\nexcept Exception as e:\n    print(e)")
    assert (ran.stdout, ran.kinds) == ("two failed at close\n", ["stream"])
    assert kernel.value("open_now") == "[]"


def test_called_by_code_a_traceback_shows_the_line(kernel: Kernel) -> None:
    assert "----> 3 1 / 0" in kernel.run("get_ipython().run_cell_magic('one', '-q', 'x = 1\\n1 / 0')").traceback


def test_run_all_stops(kernel: Kernel) -> None:
    first = kernel.client.execute("%%one -q\nimport time\ntime.sleep(1)\n1 / 0", stop_on_error=True)  # the second waits in the queue
    second = kernel.client.execute("print('ran')")
    assert kernel._reply(first, 20)["status"] == "error"
    assert kernel._reply(second, 20)["status"] in {"aborted", "error"}
    while kernel.run("1").status == "aborted":  # the kernel turns requests away for a moment longer
        pass


def test_a_name_keeps_the_report_after_an_error_too(kernel: Kernel) -> None:
    kernel.run("%%one -q -o after\n1 / 0")
    assert kernel.value("type(after).__name__") == "'FakeReport'"
    kernel.run("del after")


def test_the_report_is_frozen_when_the_cell_ends(kernel: Kernel) -> None:
    kernel.run("%%one -q -o frozen\n1")
    assert kernel.value("__import__('torchdebug_magics').last_session().report is frozen") == "True"
    kernel.run("del frozen")
