"""Loading is silent and unloading leaves nothing; help and Tab know every flag."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import on_both_stacks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kernel.kernels import Kernel

STATE = """
def state():
    import threading
    s = get_ipython()
    matchers = list(getattr(s.Completer, "custom_matchers", ()))
    return repr([
        sorted((kind, name) for kind, magics in s.magics_manager.magics.items() for name in magics),
        sorted(s.magics_manager.registry), [len(s.events.callbacks[e]) for e in sorted(s.events.callbacks)],
        len(s.input_transformers_cleanup), len(matchers), sorted(t.name for t in threading.enumerate()),
        sorted(map(str, s.display_formatter.mimebundle_formatter.type_printers)),
        sorted(name for name in s.user_ns if not name.startswith("_")),
    ])
"""

# IPython shows an interrupt of a nested cell and goes on, so that the loop needs an end of its own, which comes after Stop on any machine.
RUNS = """
import os
open("begun", "w").close()
while not os.path.exists("pressed"):
    get_ipython().run_cell('%%one -q\\n%%two -q\\n1')
"""


@pytest.fixture
def unloaded(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel without the extension; it is loaded again after the test."""
    kernel.run(STATE)
    kernel.run("%unload_ext torchdebug_magics")
    yield kernel
    kernel.run("%load_ext torchdebug_magics")
    kernel.run("del state")


@on_both_stacks
def test_unloading_leaves_nothing(unloaded: Kernel) -> None:
    kernel = unloaded
    before = kernel.value("state()")
    loading = kernel.run("%load_ext torchdebug_magics")
    assert (loading.status, loading.outputs) == ("ok", [])
    kernel.run("%%one -q --live\nimport time as _time\n_time.sleep(0.5)")
    kernel.run("%reload_ext torchdebug_magics")
    leaving = kernel.run("%unload_ext torchdebug_magics")
    assert (leaving.status, leaving.outputs) == ("ok", [])
    assert kernel.value("state()") == before
    assert kernel.run("%%one\n1").ename == "UsageError"
    assert kernel.run("%one").ename == "UsageError"
    assert kernel.run("%torchdebug").ename == "UsageError"


def test_unloading_inside_a_cell_closes_its_session(kernel: Kernel) -> None:
    ran = kernel.run("%%one -q\n%unload_ext torchdebug_magics\nopen_now")
    kernel.run("%load_ext torchdebug_magics")
    assert (ran.status, ran.value) == ("ok", "[]")
    assert kernel.value("log") == "['open one', 'close one']"


@on_both_stacks
def test_reloading_inside_a_cell(kernel: Kernel) -> None:
    assert kernel.run("%%one -q\n%reload_ext torchdebug_magics\n3").value == "3"
    assert kernel.value("open_now") == "[]"
    assert kernel.run("%%one -q\n4").value == "4"


@on_both_stacks
@pytest.mark.parametrize("line", ["%%one?", "%one?"])
def test_help_by_question_mark(kernel: Kernel, line: str) -> None:
    said = kernel.run(line).payload[0]["data"]["text/plain"]
    for word in ("Describes one, 100% of it.", "--label TEXT", "--output NAME", "--json PATH", "--widget"):
        assert word in said


@pytest.mark.parametrize("cell", ["%%one -h\nprint('ran')\n(", "%%one -q --help # please", "%one -h\n1"])
def test_help_by_flag_runs_nothing(kernel: Kernel, cell: str) -> None:
    ran = kernel.run(cell)
    assert ran.status == "ok"
    assert "Describes one" in ran.stdout
    assert "--json PATH" in ran.stdout
    assert not ran.stdout.endswith("ran\n")
    assert kernel.value("log") == "[]"


@on_both_stacks
def test_tab(kernel: Kernel) -> None:
    assert {"%one", "%%one"} <= set(kernel.complete("%on"))
    if kernel.stack == "colab":
        return  # IPython 7 has no matchers; the names above are all that it can offer
    assert kernel.complete("%%one --l") == ["--label", "--live"]
    assert kernel.complete("%%one -q --js") == ["--json"]
    assert kernel.complete("%torchdebug display fro") == ["frozen"]
    assert "print" in kernel.complete("%%one\npri")
    kernel.run("a_value_to_complete = 1")
    assert kernel.complete("%one a_value_to") == ["a_value_to_complete"]


def test_a_terminal_waits_for_the_body(kernel: Kernel) -> None:
    assert kernel.is_complete("%%one\n") == kernel.is_complete("%%time\n") == "incomplete"
    assert kernel.is_complete("%%one\nx = 1\n\n") == kernel.is_complete("%%time\nx = 1\n\n")


@on_both_stacks
def test_names_on_the_line_are_expanded_as_by_other_magics(kernel: Kernel) -> None:
    kernel.run("x = 'very'")
    assert "verdict of oneveryvery" in kernel.run("%%one --label {x}$x\n1").text
    assert "verdict of one{no}$x" in kernel.run("%%one --label {no}$x\n1").text
    assert kernel.run("%%one --label what?\n1").status == "ok"
    assert kernel.run("%%one --label back\\\n1").status == "ok"


def test_interrupts_at_any_moment_leave_nothing_open(kernel: Kernel) -> None:
    """On the modern stack alone: IPython 7 fails to print some tracebacks of nested cells, with or without us, and answers no more."""
    moments = random.Random(0)
    begun, pressed = kernel.folder / "begun", kernel.folder / "pressed"
    for _ in range(12):
        begun.unlink(missing_ok=True)
        pressed.unlink(missing_ok=True)
        kernel.run(RUNS, interrupt_s=moments.uniform(0.05, 0.1), interrupt_between=(begun, pressed))
        assert kernel.value("open_now") == "[]"
    assert kernel.run("%%one -q\n5").value == "5"
