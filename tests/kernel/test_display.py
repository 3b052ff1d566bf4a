"""What a front end is told: live while the cell runs, one frozen report at its end, and no widget left unasked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import WIDGET, on_both_stacks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kernel.kernels import Kernel

pytestmark = on_both_stacks

WIDGETS = "len(getattr(__import__('ipywidgets').widgets.widget, '_instances', None) or __import__('ipywidgets').Widget.widgets)"
LIVE = "%%one --live\nimport time\ntime.sleep(1.2)\nprint('said')\n5"
FROZEN = {"text/plain", "text/html"}


@pytest.fixture
def display_mode(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel whose display mode is put back."""
    yield kernel
    kernel.run("%torchdebug display auto")


def comms(ran) -> list[str]:
    return [message["msg_type"] for message in ran.messages if message["msg_type"].startswith("comm_")]


def test_a_quick_cell_shows_its_report_alone(kernel: Kernel) -> None:
    ran = kernel.run("%%one --live\n1")
    assert ran.kinds == ["execute_result", "display_data"]
    assert ran.displays[0].keys() == FROZEN
    assert (comms(ran), ran.updates) == ([], [])


def test_live_in_a_widget_then_frozen(kernel: Kernel) -> None:
    kernel.run(LIVE)
    before = kernel.value(WIDGETS)
    ran = kernel.run(LIVE)
    assert ran.kinds == ["display_data", "stream", "execute_result", "display_data"]
    first = next(message["content"]["data"] for message in ran.messages if message["msg_type"] == "display_data")
    assert WIDGET in first
    seen = [
        message["content"]["data"]["state"]["value"]
        for message in ran.messages
        if message["msg_type"] == "comm_msg" and "value" in message["content"]["data"].get("state", {})
    ]
    assert 1 <= len(seen) <= 4, "at most 4 a second"
    assert all("looked" in html for html in seen)
    assert ran.updates == [{"text/plain": "", "text/html": ""}]
    assert [set(shown) for shown in ran.displays] == [FROZEN, FROZEN]
    assert "verdict of one" in ran.displays[1]["text/html"]
    assert kernel.value(WIDGETS) == before
    assert set(comms(ran)) >= {"comm_open", "comm_close"}
    assert kernel.value("[t.name for t in __import__('threading').enumerate() if 'torchdebug' in t.name]") == "[]"


def test_a_live_view_that_does_not_change_is_sent_once(kernel: Kernel) -> None:
    ran = kernel.run(
        "import tests.kernel.fakes.one.view as f\nf.live_page, kept = (lambda s: f.Page('live', 'info', 'still')), f.live_page"
    )
    ran = kernel.run("%%one --live\nimport time\ntime.sleep(1)")
    kernel.run("f.live_page = kept\ndel f, kept")
    assert comms(ran).count("comm_msg") == 0
    assert len(ran.updates) == 1


def test_a_live_view_that_fails_is_one_line(kernel: Kernel) -> None:
    ran = kernel.run(
        "import tests.kernel.fakes.one.view as f\nkept = f.live_page\n"
        "def f_bad(s):\n    if s > 2: raise ValueError('bad view')\n    return kept(s)\nf.live_page = f_bad"
    )
    ran = kernel.run("%%one --live\nimport time\ntime.sleep(1)\n7")
    kernel.run("f.live_page = kept\ndel f, kept, f_bad")
    assert (ran.status, ran.value) == ("ok", "7")
    assert ran.stdout == "(the live view failed: ValueError: bad view)\n"
    assert "verdict of one" in ran.text


def test_a_view_that_fails_is_one_line_with_the_verdict(kernel: Kernel) -> None:
    ran = kernel.run("%%two\n7")
    assert (ran.status, ran.value) == ("ok", "7")
    assert ran.stdout == "verdict of two\n(two could not show its report: RuntimeError: no view today)\n"


def test_colab_gets_html_and_no_comm(kernel: Kernel) -> None:
    kernel.run("import sys, types\nsys.modules['google.colab'] = types.ModuleType('google.colab')")
    ran = kernel.run(LIVE)
    said = kernel.run("%torchdebug display")
    kernel.run("del sys.modules['google.colab']")
    assert comms(ran) == []
    assert all(shown.keys() == FROZEN for shown in ran.displays)
    assert any("looked" in update["text/html"] for update in ran.updates)
    assert ran.updates[-1] == {"text/plain": "", "text/html": ""}
    assert "live as HTML" in said.stdout


def test_without_ipywidgets_the_view_is_html(kernel: Kernel) -> None:
    kernel.run("import sys\nkept = sys.modules.get('ipywidgets')\nsys.modules['ipywidgets'] = None")
    ran, left = kernel.run(LIVE), kernel.run("%%one -w\n1")
    kernel.run("sys.modules['ipywidgets'] = kept\nif kept is None: del sys.modules['ipywidgets']\ndel kept")
    assert comms(ran) == []
    assert len(ran.updates) >= 2
    assert left.displays[0].keys() == FROZEN


@pytest.mark.parametrize(
    "cell",
    [
        "%%capture held\n" + LIVE,
        f"from IPython.utils.capture import capture_output\nwith capture_output():\n    get_ipython().run_cell({LIVE!r})",
    ],
    ids=["%%capture", "capture_output"],
)
def test_captured_shows_nothing_live(kernel: Kernel, cell: str) -> None:
    ran = kernel.run(cell)
    assert (ran.status, ran.outputs, comms(ran)) == ("ok", [], [])


def test_what_was_captured_holds_the_report(kernel: Kernel) -> None:
    kernel.run("%%capture held\n%%one\nprint('said')")
    assert "verdict of one" in kernel.run("held.show()").text
    kernel.run("del held")


def test_in_an_output_widget_nothing_is_live(kernel: Kernel) -> None:
    ran = kernel.run(f"import ipywidgets\nout = ipywidgets.Output()\nwith out:\n    get_ipython().run_cell({LIVE!r})")
    kernel.run("out.close()\ndel out")
    assert ran.updates == []


def test_quiet_shows_nothing(kernel: Kernel) -> None:
    assert kernel.run("%%one -q --live\nimport time\ntime.sleep(0.5)").outputs == []


@pytest.mark.parametrize("cell", ["%%one -w\n1", "%torchdebug display widget\n%one\n1"], ids=["-w", "mode"])
def test_an_interactive_view_is_left_when_asked(display_mode: Kernel, cell: str) -> None:
    kernel = display_mode
    ran = kernel.run(cell)
    frozen, left = ran.displays[-2:]
    assert frozen.keys() == FROZEN
    assert left.keys() == {WIDGET, "text/plain"}
    assert "comm_open" in comms(ran)
    assert "comm_close" not in comms(ran)
    kernel.run("import ipywidgets\nipywidgets.Widget.close_all()")


def test_the_interactive_view_filters(kernel: Kernel) -> None:
    ran = kernel.run(
        "from torchdebug_magics.jupyter.widget import TableView\nfrom tests.kernel.fakes.one import report, view\n"
        "table = TableView(view.page(report.FakeReport(name='x')).blocks[1].blocks[0])\n"
        "table.filter.value = 'gam'\nprint('gamma' in table.html.value, 'alpha' in table.html.value)\n"
        "table.filter.value, table.column.value = '', 'size'\n"
        "print(sorted(('alpha', 'beta', 'gamma'), key=table.html.value.index))\n"
        "table.descending.value = False\nprint(sorted(('alpha', 'beta', 'gamma'), key=table.html.value.index))\n"
        "table.filter.value = 'zzz'\nprint('no row' in table.html.value)\ntable.box.close()\ndel table, TableView, report, view"
    )
    assert ran.stdout == "True False\n['beta', 'gamma', 'alpha']\n['alpha', 'gamma', 'beta']\nTrue\n", ran.text


def test_mode_frozen_and_text(display_mode: Kernel) -> None:
    kernel = display_mode
    kernel.run("%torchdebug display frozen")
    ran = kernel.run(LIVE)
    assert (comms(ran), ran.updates, [set(shown) for shown in ran.displays]) == ([], [], [FROZEN])
    kernel.run("%torchdebug display text")
    ran = kernel.run(LIVE)
    assert (comms(ran), ran.updates, [set(shown) for shown in ran.displays]) == ([], [], [{"text/plain"}])


def test_a_report_shows_itself(kernel: Kernel) -> None:
    ran = kernel.run("%%one -q -o held\n1\n")
    ran = kernel.run("held")
    assert ran.outputs[0]["data"].keys() == FROZEN
    assert "verdict of one" in ran.outputs[0]["data"]["text/html"]
    assert "alpha" in ran.value
    assert kernel.run("print(held)").stdout == "verdict of one\n"
    assert WIDGET in kernel.run("import torchdebug_magics\ntorchdebug_magics.show(held, widget=True)").displays[1]
    kernel.run("del held, torchdebug_magics")


def test_json_is_written_also_after_an_error(kernel: Kernel) -> None:
    ran = kernel.run("%%one -q --json 'a report.json'\n1 / 0")
    assert ran.ename == "ZeroDivisionError"
    path = kernel.folder / "a report.json"
    assert json.loads(path.read_text())["verdict"] == "verdict of one"
    path.unlink()


def test_a_line_examines_values(kernel: Kernel) -> None:
    kernel.run("class M:\n    def __repr__(self): return 'M()'\nm = M()")
    ran = kernel.run("%one m sum([1, 2]) -o held --label 'a b' # said")
    assert "verdict of examined" in ran.text
    assert kernel.value("log") == """["examine (M(), 3) 'a b'"]"""
    assert kernel.value("str(held)") == "'verdict of examined'"
    kernel.run("def f(inner):\n    get_ipython().run_line_magic('one', 'inner -q')\nf(8)")
    assert kernel.value("log[-1]") == '''"examine (8,) ''"'''
    unknown = kernel.run("%one nowhere")
    assert 'there is no variable `nowhere`: define it first, or write "nowhere" in quotes' in unknown.stderr + unknown.traceback
    kernel.run("del held, m, M, f")


def test_the_front_door(kernel: Kernel) -> None:
    before = kernel.value("'torch' in __import__('sys').modules")  # the kernel is shared with tests that use it
    kernel.run("%%one -q\n1")
    for line, words in (
        ("%torchdebug", ("%%one", "the fake called two", "Python 3", "memory", "verdict of one")),
        ("%torchdebug doctor", ("ipykernel", "live in a widget", "verdict of one")),
        ("%torchdebug last", ("verdict of one", "alpha")),
        ("%torchdebug --help", ("display MODE",)),
    ):
        ran = kernel.run(line)
        assert ran.status == "ok"
        for word in words:
            assert word in ran.text, (line, word)
    ran = kernel.run("%torchdebug nonsense")
    assert (ran.ename, ran.stderr.count("\n")) == ("UsageError", 1)
    assert kernel.value("__import__('torchdebug_magics').last_session().bad") == "{'output': 'one'}"
    assert kernel.value("'torch' in __import__('sys').modules") == before
