"""Which loops certainly never end, and which may, however unlikely."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from torchdebug_magics.instruments.hangwatch.main_thread.endless import Rounds, endless_loop
from torchdebug_magics.probing.source.user_code import frames_above

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torchdebug_magics.instruments.hangwatch.report import HangFinding

    Looping = Callable[..., FrameType]

CERTAIN = {
    "1": ("x = 0\nwhile 1:\n    x += 1", "1"),
    "it sleeps": ("import time\nwhile True:\n    time.sleep(0.01)", "True"),
    "a break that is never reached": ("debug = False\nwhile True:\n    if debug:\n        break", "True"),
    "inside another loop": ("for i in range(3):\n    while i < 3:\n        pass", "i < 3"),
    "it calls what cannot change it": ("import math\nn = 3\nwhile n == 3:\n    math.sqrt(2)", "n == 3"),
    "another name is stored": ("n = 0\nwhile n < 5:\n    m = n + 1", "n < 5"),
}


@pytest.mark.parametrize("case", CERTAIN)
def test_certainly_without_end(case: str, looping: Looping) -> None:
    code, condition = CERTAIN[case]
    frame = looping(code)
    line = next(number for number, text in enumerate(code.splitlines(), 1) if text.strip().startswith("while"))
    found = endless_loop(frame, alone=True)
    assert found is not None
    assert found.headline.startswith(f"`while {condition}` never ends")
    assert found.location is not None
    assert found.location.line == line


METHOD = """
import time
done = False
class Trainer:
    def end(self):
        global done
        done = True
trainer = Trainer()
while not done:
    time.sleep(0.01)
    trainer
"""
WRAPPED = """
import functools
import time
done = False
@functools.lru_cache
def end():
    global done
    done = True
def wrap(function):
    return functools.partial(function)
end = wrap(end)
while not done:
    time.sleep(0.01)
"""
LAMBDA = """
import time
done = False
ends = [lambda: globals().update(done=True)]
while not done:
    time.sleep(0.01)
    ends
"""
UNCERTAIN = {
    "break": "while True:\n    if not 1:\n        break\n    x = 3\n    if x == 4:\n        break",
    "return": "def f(x):\n    while True:\n        if x is f:\n            return\nf(1)",
    "raise": "x = 1\nwhile True:\n    if x == []:\n        raise ValueError",
    "it stores it in a branch": "n, m = 0, []\nwhile n < 3:\n    if m:\n        n = 4",
    "walrus": "n = 0\nwhile n < 3:\n    (n := 0)",
    "an attribute": "class A:\n    done = False\na = A()\nwhile not a.done:\n    pass",
    "a call": "def step():\n    pass\nwhile True:\n    step()",
    "a condition that is called": "def goes_on():\n    return True\nwhile goes_on():\n    pass",
    "a closure": "import time\ndef f():\n    done = False\n    def end():\n        nonlocal done\n        done = True\n"
    "    while not done:\n        time.sleep(0.01)\nf()",
    "a function stores the global name": "import time\ndone = False\ndef end():\n    global done\n    done = True\n"
    "while not done:\n    time.sleep(0.01)",
    "a method stores the global name": METHOD,
    "a function that is wrapped stores the global name": WRAPPED,
    "a lambda changes the names": LAMBDA,
    "a list that grows": "import time\ntodo = []\nwhile len(todo) < 3:\n    todo.append(1)\n    todo.clear()\n    time.sleep(0.01)",
    "an item is stored": "todo = [1]\nwhile len(todo) > 0:\n    todo[0:0] = []",
    "a for loop": "for i in iter(int, 1):\n    pass",
    "it ends": "n = 5\nimport time\nfor _ in range(10 ** 9):\n    while n < 3:\n        pass\n    time.sleep(0.01)",
    "an await": "import asyncio\nasync def f():\n    while True:\n        await asyncio.sleep(0.01)\nasyncio.run(f())",
    "a tensor": "import torch\nx = torch.zeros(())\nwhile x == 0:\n    pass",
}


@pytest.mark.parametrize("case", UNCERTAIN)
def test_may_end(case: str, looping: Looping) -> None:
    assert endless_loop(looping(UNCERTAIN[case]), alone=True) is None


@pytest.mark.parametrize("code", ["done = False\nwhile not done:\n    pass", "todo = [1]\nwhile len(todo) > 0:\n    pass"])
def test_beside_another_thread_of_the_users_a_global_name_may_change(code: str, looping: Looping) -> None:
    frame = looping(code)
    assert endless_loop(frame, alone=True) is not None
    assert endless_loop(frame, alone=False) is None


def test_beside_another_thread_a_local_name_does_not(looping: Looping) -> None:
    frame = looping("def f():\n    n = 0\n    while n < 1:\n        pass\nf()")
    assert endless_loop(frame, alone=False) is not None


class Tricky(int):
    """A number that has its own idea of itself."""

    def __bool__(self) -> bool:
        Tricky.asked = True
        return False


def test_a_number_of_the_users_own_making_is_not_asked(looping: Looping) -> None:
    Tricky.asked = False  # type: ignore[attr-defined]
    frame = looping("import time\nwhile x == 3:\n    time.sleep(0.01)", x=Tricky(3))
    assert endless_loop(frame, alone=True) is None
    assert not Tricky.asked  # type: ignore[attr-defined]


def test_without_source_or_frame_nothing_is_certain(looping: Looping, tmp_path: Any) -> None:
    import linecache

    assert endless_loop(None, alone=True) is None
    frame = looping("while True:\n    pass")
    (tmp_path / "loop.py").unlink()
    linecache.checkcache()
    assert endless_loop(frame, alone=True) is None or frame.f_code.co_filename in linecache.cache


# Rounds ----------------------------------------------------------------------------------------------------------------

SAMPLE = "def sample(x):\n    while True:\n        item = random.randint(0, 39)\n        if item not in x:\n            return item\n"
NO_BATCHES = """
def train(loader):
    step = epoch = 0
    while True:
        epoch += 1
        for batch in loader:
            step += 1
            if step >= 5:
                return
train([])
"""
DRAW = "while True:\n    i = {}\n    if i in n:\n        break"
GOING = {
    "drawn": (f"import random\n{SAMPLE}sample(set(range(40)))", "`item not in x`", "`x` has 40 items"),
    "a tensor": (f"import torch\nn = torch.tensor([7])\n{DRAW.format('torch.randint(0, 5, (1,)).item()')}", "i in n", ""),
    "NumPy": (f"import numpy as np\nrng, n = np.random.default_rng(0), []\n{DRAW.format('rng.integers(9)')}", "i in n", ""),
    "a list that is never filled": (
        "import random\nkept = []\nwhile len(kept) < 3:\n    one = random.random()\n    if one > 2:\n        kept.append(one)",
        "`len(kept) < 3` is false", "`kept` has 0 items",
    ),
    "no batches": (NO_BATCHES, "step >= 5", "`step` is 0"),
}  # fmt: skip
HEALTHY = {
    "a file": "file = open(__file__)\nwhile True:\n    line = file.readline() or file.seek(0)\n    if line is None:\n        break",
    "an iterator": "import itertools\nit = itertools.cycle([1])\nwhile True:\n    item = next(it)\n    if item is None:\n        break",
    "items of items": "import time\ngrid = [[10 ** 9]]\nwhile grid[0][0]:\n    x = 1\n    grid[0][0] -= 1",
    "an item": "counts = {'a': 10 ** 9}\nwhile counts['a'] > 0:\n    x = 1\n    counts['a'] -= 1",
    "an attribute": "class A:\n    i = 0\n    def run(self):\n"
    "        while self.i < 10 ** 12:\n            x = self.i\n            self.i += 1\nA().run()",
    "what objects hold": "class A:\n    done = 0\nxs = [A()]\n"
    "while not all(a.done > 10 ** 9 for a in xs):\n    x = 1\n    xs[0].done += 1",
    "a method": "class A:\n    def go(self):\n        return 3\na = A()\nwhile True:\n    x = a.go()\n    if x > 3:\n        break",
    "tensors of a list": "import torch\nxs = [torch.ones(())]\nwhile xs[0] > 0:\n    y = 1.0 + len(xs)\n    xs[0] -= 1e-9",
    "without gradients": "import torch\nwith torch.inference_mode():\n    x = torch.ones(3)\n"
    "    while x.sum() > 0:\n        y = 1\n        x -= 1e-9",
    "a stack": "stack = [0]\nwhile stack:\n    top = stack.pop()\n    stack += [top + 1]",
    "it waits": "import time\nresults = []\nwhile len(results) < 3:\n    x = 1.0 + len(results)\n    time.sleep(0.01)",
    "a for loop": "import random\nwhile True:\n    x = random.random()\n"
    "    for i in range(10 ** 9):\n        x += 1\n    if x < 0:\n        break",
    "around it": "import random\nfor _ in range(10 ** 9):\n"
    "    while True:\n        x = random.random()\n        if x > 0.9999:\n            break",
    "around it, and filled": "import random\nout = []\nwhile len(out) < 10 ** 9:\n    while True:\n        x = random.random()\n"
    "        if x > 0.9999:\n            break\n    out.append(x)",
    "for each": f"import random\n{SAMPLE}from itertools import repeat\nany(0 for _ in map(sample, repeat(set(range(39)))))",
    "a generator": "import random\ndef some():\n    while True:\n        x = random.random()\n"
    "        if x > 2:\n            return\n        yield x\nfor x in some():\n    pass",
    "no end": "import random\nwhile True:\n    x = random.random()",
}  # fmt: skip


def gone_round(frame: FrameType, *, alone: bool = True, looks: int = 50) -> HangFinding | None:
    """What is said after many looks, a quarter of a second apart by their clock."""
    file, rounds = frame.f_code.co_filename, Rounds()
    ident = next(ident for ident, one in sys._current_frames().items() if frame in list(frames_above(one)))
    del frame
    for at in range(looks):
        time.sleep(0.011)
        stack = frames_above(sys._current_frames()[ident])
        rounds.look([one for one in stack if one.f_code.co_filename == file], at / 4)
    return rounds.longer_than(10.0, looks / 4, alone=alone)


@pytest.mark.parametrize("case", GOING)
def test_it_has_gone_round(case: str, looping: Looping) -> None:
    code, ways, still = GOING[case]
    found = gone_round(looping(code))
    assert found is not None
    assert (found.state, found.cause) == ("slow", "infinite_loop")
    assert found.location is not None
    assert found.location.line == next(number for number, text in enumerate(code.splitlines(), 1) if text.strip().startswith("while"))
    assert ways in found.headline.partition("only where")[2]
    assert still in found.reason


@pytest.mark.parametrize("case", HEALTHY)
def test_it_goes_on(case: str, looping: Looping) -> None:
    assert gone_round(looping(HEALTHY[case], __file__=__file__)) is None


def test_while_another_thread_may_end_it_only_a_search_is_told_of(looping: Looping) -> None:
    code = "import time\nxs = []\nwhile not xs:\n    x = 1.0 + len(xs)"
    assert gone_round(looping(code)) is not None
    assert gone_round(looping(code), alone=False) is None
    assert gone_round(looping(GOING["drawn"][0]), alone=False) is not None
