from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.unit.instruments.deterministic.origin_cases import CASES
from tests.unit.instruments.deterministic.runs import Cell, Ops
from torchdebug_magics.instruments.deterministic.origin import first_difference
from torchdebug_magics.probing.rng import RandomState

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _times_differ_in_what_a_tensor_keeps() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", CASES)
def test_the_line_and_the_cause_are_named(name: str, tmp_path) -> None:
    case = CASES[name]
    cell = Cell(case.source, before=case.before, path=str(tmp_path / "log.txt"))
    found = cell.origin()
    assert not cell.guard.problems
    assert found is not None
    other = None if found.other is None else found.other.line
    assert (found.cause, found.location.line, found.names, other) == (case.cause, cell.line(), case.names, cell.line("# <other")), (
        name,
        found.explanation,
        found.fix,
    )
    assert not case.asked or found.sources == case.asked


def test_a_cache_that_the_first_run_filled() -> None:
    cell = Cell(
        """
        import functools
        a = cached(1)  # <-
        b = rng.random()
        x = torch.tensor([b])
        """,
        before="""
        import functools, random
        rng = random.Random(1)
        @functools.lru_cache
        def cached(key):
            return rng.random()
        """,
    )
    state = cell.start["rng"].getstate()
    put_back = cell.restore
    cell.restore = lambda: (put_back(), cell.start["rng"].setstate(state))
    found = first_difference(lambda: cell.body(Ops(0)), cell.restore, guard=cell.guard)
    assert (found.cause, found.location.line) == ("state_leak", cell.line())
    assert "cache" in found.explanation


def test_the_environment_changed(monkeypatch) -> None:
    cell = Cell("import os\na = 1\nturn = float(os.environ['ORIGIN_TURN'])  # <-\nx = torch.tensor([turn])\n")
    put_back, turns = cell.restore, itertools.count()
    cell.restore = lambda: (put_back(), monkeypatch.setenv("ORIGIN_TURN", str(next(turns))))
    found = cell.origin()
    assert (found.cause, found.location.line, found.names) == ("outside_data", cell.line(), ("turn",))


def test_a_file_that_others_write(tmp_path) -> None:
    file = tmp_path / "prices.txt"
    cell = Cell("from pathlib import Path\ntext = Path(path).read_text()  # <-\nx = torch.tensor([float(text)])\n", path=str(file))
    put_back, turns = cell.restore, itertools.count()
    cell.restore = lambda: (put_back(), file.write_text(str(next(turns))))
    found = cell.origin()
    assert (found.cause, found.location.line, found.names) == ("outside_data", cell.line(), ("text",))


def test_a_function_of_another_file_is_named_where_it_stands() -> None:
    other = Cell(
        "import time\n\ndef noise(n):\n    seed = time.time_ns()  # <-\n    return [seed % 1009] * n\n", name="/home/me/helpers.py"
    )
    other.restore()
    for code in other.codes:
        exec(code, other.names)
    cell = Cell("y = torch.zeros(2)\nx = torch.tensor(noise(3))\n", noise=other.names["noise"])
    found = cell.origin()
    assert (found.cause, found.location.file, found.location.line, found.names) == ("wall_clock", "/home/me/helpers.py", 4, ("seed",))
    assert found.location.function == "noise"


DECLARED_SAME = {
    "seeded": "a = random.random()\nb = np.random.rand(3)\nx = torch.randn(3) + a\n",
    "timed": "import time\nt = time.time()\nx = torch.ones(3)\nprint(time.time() - t)\n",
    "empty": "pass\n",
}


@pytest.mark.parametrize("source", DECLARED_SAME.values(), ids=DECLARED_SAME)
def test_the_same_op_twice_is_no_difference(source: str) -> None:
    cell = Cell(source)
    assert first_difference(lambda: cell.body(Ops(0)), cell.restore, guard=cell.guard) is None
    assert not cell.guard.problems


def test_runs_that_come_to_their_end_and_do_not_differ() -> None:
    cell = Cell("a = [1, float('nan'), {'b': object()}]\nb = {id}\nfor i in range(3):\n    a.append(i)\n")
    assert first_difference(lambda: cell.body(Ops()), cell.restore, guard=cell.guard) is None


def test_runs_that_come_to_their_end_and_differ() -> None:
    cell = Cell("import time\na = 1\nb = time.time_ns()  # <-\n")
    found = first_difference(lambda: cell.body(Ops()), cell.restore, guard=cell.guard)
    assert (found.cause, found.location.line, found.names) == ("wall_clock", 3, ("b",))


def test_an_interrupt_passes_and_leaves_nothing() -> None:
    cell = Cell("a = 1\nraise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        first_difference(lambda: cell.body(Ops()), cell.restore, guard=cell.guard)
    assert sys.gettrace() is None
    assert sys.getprofile() is None


def test_a_generator_that_lives_on_is_not_followed_any_more() -> None:
    cell = Cell("def count():\n    for i in range(9):\n        yield i\nkept = count()\nnext(kept)\nbox.append(kept)\n", box=(box := []))
    first_difference(lambda: cell.body(Ops()), cell.restore, guard=cell.guard)
    assert [one.gi_frame.f_trace for one in box] == [None, None]
    assert next(box[0]) == 1


def test_a_thread_that_lives_on_is_not_followed_any_more() -> None:
    go, done, seen = threading.Event(), [], []

    def late() -> None:
        go.wait(5)
        seen.append(sys.gettrace())
        done.append(1)

    cell = Cell("import threading\nt = threading.Thread(target=late)\nt.start()\nbox.append(t)\n", late=late, box=(box := []))
    first_difference(lambda: cell.body(Ops()), cell.restore, guard=cell.guard)
    go.set()
    for thread in box:
        thread.join()
    assert done == [1, 1]


def test_a_debugger_is_left_alone() -> None:
    cell = Cell("import time\nx = torch.tensor([time.time()])\n")

    def tracer(*_):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        found = first_difference(lambda: cell.body(Ops(0)), cell.restore, guard=cell.guard)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert found is None
    assert "a debugger or a coverage tool" in cell.guard.problems[0]


def test_a_profiler_is_left_alone() -> None:
    cell = Cell("import time\na = time.time()  # <-\nx = torch.tensor([a])\n")

    def profiler(*_):
        return None

    sys.setprofile(profiler)
    try:
        found = first_difference(lambda: cell.body(Ops(0)), cell.restore, guard=cell.guard)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert found.location.line == 2
    assert "a profiler is running" in cell.guard.problems[0]


def test_a_long_cell_is_followed_up_to_a_bound() -> None:
    cell = Cell("import time\nn = 0\nwhile n < 10_000:\n    n += 1\nx = torch.tensor([time.time()])\n")
    assert first_difference(lambda: cell.body(Ops(0)), cell.restore, guard=cell.guard, most_steps=1000) is None
    assert cell.guard.problems == ["only the first 1,000 lines that ran were traced"]
    assert cell.names["n"] == 10_000


@pytest.mark.keeps_rng
def test_the_body_sees_its_own_numbers() -> None:
    before = RandomState.take()
    cell = Cell("a = random.random()\nb = np.random.rand()\nc = torch.rand(1).item()\nout.append((a, b, c))\n", out=(out := []))
    cell.restore()
    cell.body(Ops())
    first_difference(lambda: cell.body(Ops()), cell.restore, guard=cell.guard)
    before.put_back()
    assert out[0] == out[1] == out[2]


def test_what_the_user_wrote_is_not_asked() -> None:
    cell = Cell(
        """
        import time
        class Touchy:
            def __init__(self):
                self.n = 1
            def __getattr__(self, name):
                asked.append(name)
                raise AttributeError(name)
            def __len__(self):
                asked.append("len")
                return 1
            def __eq__(self, other):
                asked.append("eq")
                return False
            __hash__ = None
            def __repr__(self):
                asked.append("repr")
                return ""
            @property
            def p(self):
                asked.append("p")
                return 1
        t = Touchy()
        box = [t, {"t": t}]
        a = t.n
        del t
        """,
        asked=(asked := []),
    )
    first_difference(lambda: cell.body(Ops()), cell.restore, guard=cell.guard)
    assert asked == []
    assert not cell.guard.problems
