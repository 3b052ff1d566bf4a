"""The call whose answer makes two runs differ is named, wherever it stands, and nothing else that is asked beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.instruments.deterministic.planted import IMPORTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from IPython.core.interactiveshell import InteractiveShell

CASES = {
    "bound by `from`": (
        "wall_clock",
        """\
from time import perf_counter as now
a = now()  # <-
x = torch.tensor([a])
""",
    ),
    "beside logs": (
        "wall_clock",
        """\
t0 = time.time()
log = [t0]
b = time.perf_counter_ns()  # <-
log.append(time.time() - t0)
x = torch.zeros(3) + b
""",
    ),
    "a date": (
        "wall_clock",
        """\
stamp = datetime.now()  # <-
x = torch.tensor([stamp.microsecond])
""",
    ),
    "a default argument": (
        "wall_clock",
        """\
def f(a=time.time()):  # <-
    return a
x = torch.tensor([f()])
""",
    ),
    "a lambda": (
        "wall_clock",
        """\
f = lambda: time.time()  # <-
y = 1
x = torch.tensor([f()])
""",
    ),
    "a line of several": (
        "wall_clock",
        """\
xs = [
    1.0,
    time.time(),  # <-
]
x = torch.tensor(
    xs,
)
""",
    ),
    "an attribute": (
        "wall_clock",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.born = time.time()
        self.scale = time.time() % 1  # <-
    def forward(self, x):
        self.calls = time.time()
        return x * self.scale
y = Net()(torch.ones(2))
""",
    ),
    "a function that yields": (
        "wall_clock",
        """\
def stream():
    for i in range(3):
        junk = time.time()
        yield i + time.perf_counter()  # <-
x = torch.tensor(list(stream()))
""",
    ),
    "a coroutine": (
        "wall_clock",
        """\
import asyncio
async def get():
    await asyncio.sleep(0)
    return time.time()  # <-
x = torch.tensor([asyncio.run(get())])
""",
    ),
    "a partial": (
        "wall_clock",
        """\
import functools
g = functools.partial(pow, time.time())  # <-
x = torch.tensor(list(map(g, [1, 2])))
""",
    ),
    "an exception": (
        "wall_clock",
        """\
try:
    raise ValueError(time.time())  # <-
except ValueError as e:
    v = e.args[0]
x = torch.tensor([v])
""",
    ),
    "a layer's setting": (
        "wall_clock",
        """\
m = nn.Dropout(p=time.perf_counter() % 1)  # <-
y = m(torch.ones(100))
""",
    ),
    "NumPy's seeds": (
        "numpy_random",
        """\
s = np.random.SeedSequence()  # <-
x = torch.tensor(np.random.default_rng(s).random(2))
""",
    ),
    "NumPy's seed of None": (
        "numpy_random",
        """\
seed = None
rng = np.random.default_rng(seed)  # <-
x = torch.tensor(rng.random(2))
""",
    ),
    "NumPy's global seed": (
        "numpy_random",
        """\
np.random.seed(None)  # <-
a = np.random.rand(3)
x = torch.tensor(a)
""",
    ),
    "shuffled in place": (
        "numpy_random",
        """\
xs = list(range(50))
np.random.default_rng().shuffle(xs)  # <-
x = torch.tensor(xs)
""",
    ),
    "the one of two that matters": (
        "numpy_random",
        """\
class Data:
    def __init__(self, r): self.r = r
    def __getitem__(self, i): return self.r.random(2)
good = Data(np.random.default_rng(1))
bad = Data(np.random.default_rng())  # <-
x = [torch.from_numpy(d[0]) for d in (good, bad)]
""",
    ),
    "a seeded one and another": (
        "python_random",
        """\
a = random.random()
b = random.Random().random()  # <-
x = torch.tensor([a, b])
""",
    ),
    "several generators": (
        "python_random",
        """\
dice = [random.Random() for _ in range(3)]  # <-
x = torch.tensor([d.random() for d in dice])
""",
    ),
    "the system's generator": (
        "os_entropy",
        """\
r = random.SystemRandom()
a = r.random()  # <-
x = torch.tensor([a])
""",
    ),
    "a closure": (
        "os_entropy",
        """\
def outer():
    salt = os.urandom(7)[0] * 256  # <-
    return lambda x: x + salt
x = torch.tensor([outer()(1)])
""",
    ),
    "how much there is": (
        "os_entropy",
        """\
k = os.urandom(2)[0] % 200 + 1  # <-
x = torch.tensor(list(range(k))) * 2
""",
    ),
    "torch's seed": (
        "unseeded_generator",
        """\
s = torch.seed()  # <-
x = torch.tensor([s % 1000003])
""",
    ),
    "an address": (
        "hash_order",
        """\
keep = [object() for _ in range(64)]
key = [id(one) for one in keep]  # <-
x = torch.tensor(key)
""",
    ),
    "sorted by address": (
        "hash_order",
        """\
things = [[i] for i in range(200)]
x = torch.tensor([t[0] for t in sorted(things, key=id)])  # <-
""",
    ),
    "a set of objects": (
        "hash_order",
        """\
class Node: pass
nodes = [Node() for _ in range(100)]
for i, node in enumerate(nodes): node.i = i
d = {node: node.i for node in set(nodes)}  # <-
x = torch.tensor(list(d.values()))
""",
    ),
}


@pytest.fixture(autouse=True)
def _times_differ_in_what_a_tensor_keeps() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", CASES)
def test_the_call_and_the_cause_are_named(shell: InteractiveShell, name: str) -> None:
    cause, body = CASES[name]
    shell.run_cell(IMPORTS).raise_error()
    shell.run_cell(f"%%deterministic --verify -q -o d\n{body}", store_history=True).raise_error()
    report = shell.user_ns["d"]
    assert (report.verified, report.problems) == (False, ())
    told = report.divergence
    line = (told.other or told.location).source
    assert (told.cause, line.endswith("# <-")) == (cause, True), told


def test_a_function_of_another_file_and_its_names_are_looked_at(shell: InteractiveShell, tmp_path, monkeypatch) -> None:
    (tmp_path / "torchdebug_noise.py").write_text("from time import time_ns\n\ndef noise(n):\n    return [time_ns() % 1009] * n\n")
    monkeypatch.syspath_prepend(tmp_path)
    shell.run_cell(f"{IMPORTS}from torchdebug_noise import noise").raise_error()
    shell.run_cell("%%deterministic --verify -q -o d\nx = torch.tensor(noise(3))", store_history=True).raise_error()
    told = shell.user_ns["d"].divergence
    assert (told.cause, told.other.line, told.other.function) == ("wall_clock", 4, "noise")


def test_a_library_that_makes_its_own_generator_is_seeded_by_its_argument(shell: InteractiveShell, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "torchdebug_augment.py").write_text(
        "import numpy as np\n\nclass Jitter:\n    def __init__(self, scale, seed=None):\n        self.rng = np.random.default_rng(seed)\n"
        "    def __call__(self, x):\n        return x + self.rng.normal()\n"
    )
    monkeypatch.syspath_prepend(folder)
    shell.run_cell(f"{IMPORTS}from torchdebug_augment import Jitter").raise_error()
    shell.run_cell(
        "%%deterministic --verify -q -o d\njitter = Jitter(0.1)\nx = torch.tensor(jitter(1.0))", store_history=True
    ).raise_error()
    told = shell.user_ns["d"].divergence
    assert (told.cause, told.other.source, told.fix) == ("numpy_random", "jitter = Jitter(0.1)", "pass `seed=42` to `Jitter`")
