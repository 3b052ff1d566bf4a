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
    "a default argument": (
        "wall_clock",
        """\
def f(a=time.time()):  # <-
    return a
x = torch.tensor([f()])
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
    "NumPy's seeds": (
        "numpy_random",
        """\
s = np.random.SeedSequence()  # <-
x = torch.tensor(np.random.default_rng(s).random(2))
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
