"""A cell that was stopped in a loop: one that would not have ended is named, and any other is left alone."""

from __future__ import annotations

import ast
import random
import sys
from typing import TYPE_CHECKING, Any

import pytest

import torchdebug_magics
from torchdebug_magics.instruments.hangwatch.main_thread.stopped_loops import retry_loop

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = """\
import itertools
rounds = itertools.count()
def work():
    if next(rounds) == 40:
        raise KeyboardInterrupt
    return False
class Loader:
    def __iter__(self):
        return self
    def __next__(self):
        return 1
class Trainer:
    def __init__(self, steps):
        self.step, self.steps = 0, steps
    def train(self):
        while self.step < self.steps:
            for batch in Loader():
                self.step += 1
                work()
class Search:
    found = False
    def run(self):
        tries = 0
        while not self.found:
            tries += 1
            self.found = work()
"""
ENDLESS = {
    "a counter that nothing changes": (
        "done, wanted = 0, 5\nwhile done < wanted:\n    finished = work()\n    if finished:\n        print(done)",
        "`while done < wanted` never ends: nothing in the loop changes `done`, `wanted`",
        2,
    ),
    "a counter of a function": (
        "def collect(count):\n    n = 0\n    while n < count:\n        work()\n    return n\ncollect(3)",
        "`while n < count` never ends",
        3,
    ),
    "a loader that starts over": ("Trainer(10).train()", "`for batch in Loader()` does not end, and `while self.step < self.steps`", 17),
    "a loop in a loop": (
        "n = 0\nwhile n < 3:\n    n += 1\n    while True:\n        n += work() + 1",
        "the inner `while` does not end, and `while n < 3`",
        4,
    ),
}
MAY_END = {
    "by a break": "n = 0\nwhile n < 3:\n    if work():\n        break",
    "by what it assigns": "n = 0\nwhile n < 100:\n    work()\n    n += 1",
    "by a global name": "n = 0\ndef more():\n    global n\n    n += work()\nwhile n < 3:\n    more()",
    "by an attribute": "Search().run()",
    "by a call": "while not work():\n    pass",
    "by a list": "todo = [1]\nwhile len(todo) < 99:\n    todo.append(work())",
    "before the outer loop ends": "n = 0\nwhile n < 3:\n    for _ in range(100):\n        work()\n    n += 1",
}


def asked(shell: InteractiveShell, cell: str, magic: str) -> Any:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP, store_history=True)
        shell.run_cell(f"{magic}{cell}", store_history=True)
        if not magic:
            shell.run_cell("%torchdebug -o report", store_history=True)
    return shell.user_ns.pop("report")


@pytest.mark.parametrize("magic", ["", "%%torchdebug -o report\n"], ids=["bare", "watched"])
@pytest.mark.parametrize("case", ENDLESS.values(), ids=ENDLESS)
def test_a_loop_that_would_not_have_ended_is_named(case: tuple[str, str, int], magic: str, shell: InteractiveShell) -> None:
    cell, said, line = case
    report = asked(shell, cell, magic)
    assert said in report.verdict
    where = report.location
    in_cell = "Trainer" not in cell
    assert where.line == line + (in_cell and bool(magic))
    assert where.source.startswith(("while", "for"))


@pytest.mark.parametrize("cell", MAY_END.values(), ids=MAY_END)
def test_any_other_loop_is_left_alone(cell: str, shell: InteractiveShell) -> None:
    report = asked(shell, cell, "")
    assert report.instrument is None
    assert "The cell was stopped" in report.verdict


SOON = """\
import _thread, random, threading, numpy as np, torch
timer = threading.Timer(0.4, _thread.interrupt_main)
"""
NO_DRAW_LEAVES = {
    "all taken": "taken = set(range(1, 10))\nitem = 3\ntimer.start()\nwhile item in taken:\n    item = random.randint(1, 9)",
    "a class of one image": (
        "places, label, i = {4: np.array([17])}, np.int64(4), 17\nother = i\ntimer.start()\nwhile other == i:\n"
        "    other = np.random.choice(places[label])"
    ),
    "one word left": (
        "probs, special = torch.tensor([0.0, 1.0, 0.0]), [1, 2]\nout = torch.tensor([2])\ntimer.start()\n"
        "while out.item() in special:\n    out = torch.multinomial(probs, num_samples=1)"
    ),
    "of a condition of two parts": (
        "low, high = 5, 8\nn = 0\ntimer.start()\nwhile not (n > low and n < high):\n    n = random.randrange(5)"
    ),
    "of numbers that are written there": "k = 0\ntimer.start()\nwhile k not in (10, 11):\n    k = int(np.random.randint(10))",
    "of a range of torch": "n = torch.tensor(1)\ntimer.start()\nwhile n < 10:\n    n = torch.randint(0, 10, (1,)).item()",
}
A_DRAW_LEAVES = {
    "one is free": "taken = set(range(1, 9))\nitem = 3\ntimer.start()\nwhile item in taken:\n    item = random.randint(1, 9)",
    "at the end of the range": "n = 0\ntimer.start()\nwhile n < 9 or timer:\n    n = random.randint(1, 9)",
    "of numbers of which one can be drawn": "k = 0\ntimer.start()\nwhile k not in (9, 11):\n    k = int(np.random.randint(10))",
    "of another name": "n, m = 0, 0\ntimer.start()\nwhile n == 0:\n    m = random.randint(1, 9)",
    "what is drawn is not known": "items = (x for x in [1])\nn = 0\ntimer.start()\nwhile n == 0:\n    n = random.choice(range(1))+0",
}


@pytest.mark.parametrize("magic", ["", "%%torchdebug -o report\n"], ids=["bare", "watched"])
@pytest.mark.parametrize("cell", NO_DRAW_LEAVES.values(), ids=NO_DRAW_LEAVES)
def test_a_loop_that_no_draw_leaves_is_named_and_bounded(cell: str, magic: str, shell: InteractiveShell) -> None:
    report = asked(shell, SOON + cell, magic)
    assert "never ends: `" in report.verdict
    assert report.location.source.startswith("while")
    (fixed,) = torchdebug_magics.fixed_source(report).values()
    assert shell.run_cell(fixed.removeprefix(magic).replace("timer.start()", "pass")).success


@pytest.mark.parametrize("cell", A_DRAW_LEAVES.values(), ids=A_DRAW_LEAVES)
def test_of_a_loop_that_a_draw_may_leave_nothing_is_said(cell: str) -> None:
    tree = ast.parse(cell)
    space: dict[str, Any] = {}
    exec(SOON + "work = print\n" + cell.partition("timer.start()")[0] + "import sys\nframe = sys._getframe()", space)
    assert retry_loop([node for node in tree.body if isinstance(node, ast.While)], space["frame"]) is None


NOTHING_CHANGES = {
    "of a class without images": (
        "def pick(places, n):\n    chosen = torch.zeros(0)\n    while chosen.shape[0] < n:\n"
        "        chosen = torch.cat((chosen, torch.randperm(places.shape[0])))\n    return chosen[:n]\n"
        "timer.start()\nout = pick(torch.zeros(0), 3)"
    ),
    "of an empty list": "rest, out = [], []\ntimer.start()\nwhile len(out) < 3:\n    out.extend(rest)\nprint(out)",
}
SOMETHING_MAY_CHANGE = {
    "by a function of the user's": "def more():\n    return False\nn = 0\ntimer.start()\nwhile n < 1:\n    n = int(more())",
    "by another thread": "import time\nout = []\ntimer.start()\nwhile not out:\n    time.sleep(0.01)",
    "by what is counted": "n = 0\ntimer.start()\nwhile n < 10**9:\n    n += 1",
}


@pytest.mark.parametrize("cell", NOTHING_CHANGES.values(), ids=NOTHING_CHANGES)
def test_a_loop_of_which_more_rounds_change_nothing_is_guarded(cell: str, shell: InteractiveShell) -> None:
    report = asked(shell, SOON + cell, "")
    assert "never ends: 20 more rounds change nothing" in report.verdict
    assert report.fix_state == "verified"
    (fixed,) = torchdebug_magics.fixed_source(report).values()
    assert shell.run_cell(fixed.replace("timer.start()", "pass")).success


@pytest.mark.parametrize("cell", SOMETHING_MAY_CHANGE.values(), ids=SOMETHING_MAY_CHANGE)
def test_of_a_loop_that_something_may_end_nothing_is_said(cell: str, shell: InteractiveShell) -> None:
    assert "more rounds" not in asked(shell, SOON + cell, "").verdict


DATA = """\
import os, random, torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __init__(self, folder, size=4):
        self.folder, self.size = folder, size
    def __len__(self):
        return self.size
    def __getitem__(self, i):
        {body}
class Rounds:
    def __iter__(self):
        return self
    def __next__(self):
        return torch.zeros(1)
class Everything(torch.utils.data.Sampler):
    def __iter__(self):
        while True:
            yield random.randrange(4)
"""
RETRIES = """while True:
            try:
                return torch.tensor([float(open(os.path.join(self.folder, str(i))).read())])
            except Exception:
                continue"""
SKIPS = """while 1:
            name = os.path.join(self.folder, str(i))
            files = [each for each in (name,) if os.path.exists(each)]
            if not files:
                continue
            return torch.zeros(1)"""
BODIES = {
    "an error that is caught each time": (
        RETRIES,
        "`while True` in `__getitem__` goes round for ever: it catches a FileNotFoundError in each round",
        11,
    ),
    "a sample that never passes": (SKIPS, "each round ends here, as `not files`", 13),
    "a condition that stays": ("while i >= 0:\n            n = i + 1\n        return torch.zeros(n)", "`i >= 0` stays true", 10),
}


ENDED = """\
from torch.utils.data._utils import signal_handling
signal_handling._remove_worker_pids(id(batches))
for worker in batches._workers:
    worker.kill()
batches._shutdown_workers()
"""


def stopped_after(shell: InteractiveShell, seconds: float, cell: str) -> Any:
    """The report after a cell that Stop ends."""
    shell.run_cell("%load_ext torchdebug_magics")
    shell.run_cell(f"import os, threading\nthreading.Timer({seconds}, os.kill, (os.getpid(), 2)).start()\n{cell}", store_history=True)
    shell.run_cell("%torchdebug -o r")
    return shell.user_ns.pop("r")


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_sample_of_a_worker_is_read_again(body: tuple[str, str, int], shell: InteractiveShell) -> None:
    text, said, line = body
    shell.run_cell(DATA.format(body=text), store_history=True)
    state = random.getstate()
    report = stopped_after(shell, 2, "batches = iter(DataLoader(Data('/nowhere/at-all'), num_workers=1))\nnext(batches)")
    shell.run_cell(ENDED)
    assert said in report.verdict
    assert report.location.line == line
    assert random.getstate() == state
    assert sys.gettrace() is None


STEADY = {
    "that grows": """import time; ids = []
        while len(ids) < 512:
            time.sleep(0.01); ids.append(i % 7)
        return torch.tensor(ids)""",
    "that sleeps": "import time; time.sleep(0.6); return torch.zeros(1)",
}


@pytest.mark.parametrize("body", STEADY.values(), ids=STEADY)
def test_a_sample_that_can_be_read_is_no_endless_one(body: str, shell: InteractiveShell) -> None:
    shell.run_cell(DATA.format(body=body), store_history=True)
    report = stopped_after(shell, 1, "batches = iter(DataLoader(Data('.', size=40), num_workers=1))\nfor _ in batches:\n    pass")
    shell.run_cell(ENDED)
    assert "for ever" not in report.verdict


def test_a_lock_that_is_held_is_not_waited_for(shell: InteractiveShell) -> None:
    shell.run_cell(
        DATA.format(body="lock.acquire(); return torch.zeros(1)")
        + "import multiprocessing\nlock = multiprocessing.Lock()\nlock.acquire()\n"
    )
    report = stopped_after(shell, 1, "batches = iter(DataLoader(Data('.'), num_workers=1))\nnext(batches)")
    shell.run_cell(ENDED)
    assert "for ever" not in report.verdict


UNENDING = {
    "Rounds()": "`Rounds.__next__` has given",
    "data": "`data[4]` raises no IndexError",
    "DataLoader(data, sampler=Everything())": "`Everything.__iter__` has given",
}


@pytest.mark.parametrize("items", UNENDING)
def test_what_goes_on_behind_its_end_is_named(items: str, shell: InteractiveShell) -> None:
    shell.run_cell(DATA.format(body="return torch.zeros(1)") + f"data = Data('.')\nitems = {items}\n", store_history=True)
    assert UNENDING[items].replace("data[4]", "items[4]") in stopped_after(shell, 1, "for x in items:\n    sum(x)").verdict


ENDING = {
    "by a break": "for x in data:\n    if sum(x):\n        break",
    "a range": "import time\nfor i in range(len(data)):\n    time.sleep(9)",
    "a sampler of several epochs": "import time\nfor x in DataLoader(range(4), sampler=[0, 1, 2, 3] * 200):\n    time.sleep(9)",
}


@pytest.mark.parametrize("cell", ENDING.values(), ids=ENDING)
def test_what_may_end_is_left_alone(cell: str, shell: InteractiveShell) -> None:
    shell.run_cell(DATA.format(body="return torch.zeros(1)") + "data = Data('.')\n", store_history=True)
    verdict = stopped_after(shell, 1, cell).verdict
    assert "IndexError" not in verdict
    assert "never ends" not in verdict
