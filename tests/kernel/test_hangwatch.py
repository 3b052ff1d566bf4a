"""A kernel that is watched while it hangs: what is said in it and after it, how a cell is ended, and what is left then."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import on_both_stacks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kernel.kernels import Kernel

STATE = """
import torch, torchdebug_magics.instruments.hangwatch.probe

def _hang_state():
    import multiprocessing, signal, sys, threading
    from multiprocessing.process import BaseProcess
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return (fd, BaseProcess.start.__qualname__ if hasattr(BaseProcess.start, "__qualname__") else "patched",
            [thread.name for thread in threading.enumerate() if thread.name.startswith("torchdebug")],
            [one for one in (sys.stdout, sys.stderr) if type(vars(one).get("write")).__module__.startswith("torchdebug")],
            signal.getsignal(signal.SIGINT).__name__,
            [child.name for child in multiprocessing.active_children()])
"""


@pytest.fixture
def watched(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel that is afterwards as it was before."""
    assert kernel.run(STATE).status == "ok"
    before = kernel.value("_hang_state()")
    yield kernel
    assert kernel.value("_hang_state()") == before
    kernel.run("del _hang_state")


# Through a cell ------------------------------------------------------------------------------------------------------


def test_a_name_keeps_the_report_after_an_interrupt(watched: Kernel) -> None:
    ran = watched.run("%%hangwatch -o h\nimport time\ntime.sleep(20)", interrupt_s=0.8)
    assert (ran.status, ran.ename) == ("error", "KeyboardInterrupt")
    assert ran.took_s < 4
    assert watched.value("(h.state, h.ended_by, h.cause, h.location.line, h.stopped_count)") == "('interrupted', 'Stop', None, 3, 0)"


@on_both_stacks
def test_a_lock_of_its_own_is_ended_and_the_lines_are_those_of_the_cell(watched: Kernel) -> None:
    ran = watched.run("%%hangwatch -o h --after 0.6 --stop\nimport threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()")
    assert (ran.status, ran.ename) == ("error", "KeyboardInterrupt")
    assert "Stuck: the main thread waits for a lock that it holds itself" in ran.text.replace("\n", " ")
    assert "lock.acquire()" in ran.traceback
    assert "hangwatch" not in ran.traceback, "a line of ours"
    assert watched.value("(h.state, h.cause, h.location.cell, h.location.line, h.root.acquired.line)") == repr((
        "stuck", "self_deadlock", ran.count, 5, 4,
    ))  # fmt: skip


@pytest.mark.parametrize("body", ["await asyncio.Event().wait()", "await asyncio.gather(asyncio.Queue().get(), asyncio.Event().wait())"])
def test_an_await_that_never_ends_is_ended(body: str, watched: Kernel) -> None:
    ran = watched.run(f"%%hangwatch -o h --after 0.6 --stop\nimport asyncio\n{body}")
    assert ran.status == "error"
    assert ran.ename in {"KeyboardInterrupt", "CancelledError"}
    assert watched.value("(h.state, h.ended_by, h.location.line)") == "('stuck', '--stop', 3)"


def test_under_time_it_sees_the_same_line(watched: Kernel) -> None:
    ran = watched.run("%%hangwatch -o h --after 0.5\n%%time\nimport time\ntime.sleep(2)")
    assert ran.status == "ok"
    assert "Wall time: 2" in ran.stdout
    assert watched.value("(h.state, h.location.source)") == "('slow', 'time.sleep(2)')"


def test_a_sleep_in_code_without_source_is_not_stuck(watched: Kernel) -> None:
    ran = watched.run("%%hangwatch -o h --after 0.5 --stop\nexec('import time; time.sleep(2.5)')\ndone = True")
    assert (ran.status, watched.value("h.state"), watched.value("done")) == ("ok", "'slow'", "True")


def test_what_is_printed_is_the_cells(watched: Kernel) -> None:
    ran = watched.run("%%hangwatch --after 0.5\nimport time\nprint('a')\ntime.sleep(1.6)\nprint('b')")
    assert ran.stdout == "a\nb\n"
    assert ran.stderr == ""
    assert len([shown for shown in ran.displays if shown["text/plain"]]) == 1, "the live view is still there"


def test_it_says_where_everything_stands(watched: Kernel) -> None:
    ran = watched.run("import torchdebug_magics\ntorchdebug_magics.hangwatch.look()")
    assert "the main thread" in ran.stdout
    assert f"In[{ran.count}] line 2" in ran.stdout


# Over cells ----------------------------------------------------------------------------------------------------------


@on_both_stacks
def test_over_cells_it_watches_and_shows_nothing_in_them(watched: Kernel) -> None:
    assert watched.run("%hangwatch on --after 0.6").status == "ok"
    plain = watched.run("print('one')")
    assert (plain.kinds, plain.stdout) == (["stream"], "one\n")
    slow = watched.run("import time\ntime.sleep(1.9)")
    assert slow.kinds == []
    assert watched.run("1 / 0").kinds == ["error"]
    time.sleep(1.0)  # nothing runs: that is no hang
    after = watched.run("print('two')")
    assert (after.kinds, after.stdout) == (["stream"], "two\n")
    off = watched.run("%hangwatch off")
    said = " ".join(off.text.split())
    assert "sleeps in time.sleep(1.9)" in said
    assert f"In[{slow.count}] line 2" in said


def test_a_kernel_that_does_nothing_does_not_hang(watched: Kernel) -> None:
    watched.run("%hangwatch on --after 0.5")
    time.sleep(2)
    assert "Finished" in watched.run("%hangwatch off").text


def test_a_cell_under_both_and_the_lasting_one_ends_first(watched: Kernel) -> None:
    watched.run("%hangwatch on --after 5")
    ran = watched.run("%%hangwatch -q\n%hangwatch off\nprint('x')")
    assert (ran.status, ran.stdout.splitlines()[-1]) == ("ok", "x")
    assert watched.run("print('y')").stdout == "y\n"


# Getting out ---------------------------------------------------------------------------------------------------------

GLOO = """
import multiprocessing, os, signal, tempfile, threading
import torch
import torch.distributed as dist

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

def _join(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)

def _other(file):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Stop reaches it, too
    _join(1, file)
    threading.Event().wait()

_file = os.path.join(tempfile.mkdtemp(), "store")
"""
GLOO_CELL = """%%hangwatch -o h --after 1
_process = multiprocessing.get_context("fork").Process(target=_other, args=(_file,))
_process.start()
_join(0, _file)
dist.all_reduce(torch.ones(2))
"""
GLOO_END = """
import shutil
dist.destroy_process_group()
_process.join(); _process.close()
shutil.rmtree(os.path.dirname(_file))
"""


@on_both_stacks
def test_stop_ends_a_wait_in_gloo_and_the_rank_that_was_started(watched: Kernel) -> None:
    assert watched.run(GLOO).status == "ok"
    ran = watched.run(GLOO_CELL, interrupt_s=3.5)
    assert ran.status == "error"
    assert ran.took_s < 8
    assert watched.value("(h.state, h.ended_by, h.stopped_count, h.cause)") == "('stuck', 'Stop', 1, 'collective_missing')"
    assert "rank 1 never called all_reduce" in (watched.value("h.headline") or "")
    assert watched.run(GLOO_END).status == "ok"


def test_stop_takes_no_process_of_an_earlier_cell(watched: Kernel) -> None:
    watched.run("import subprocess\nearlier = subprocess.Popen(['sleep', '60'], start_new_session=True)")
    ran = watched.run(
        "%%hangwatch -o h\nmine = subprocess.Popen(['sleep', '60'], start_new_session=True)\nimport time\ntime.sleep(20)", interrupt_s=0.8
    )
    assert ran.ename == "KeyboardInterrupt"
    assert watched.value("(earlier.poll(), mine.wait(5) < 0, h.stopped_count)") == "(None, True, 1)"
    watched.run("earlier.kill(); earlier.wait(); del earlier, mine")
