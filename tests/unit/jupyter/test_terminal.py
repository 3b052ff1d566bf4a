"""Without a kernel, as in a terminal or a script: text alone, and no thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

import torchdebug_magics
from torchdebug_magics import catalog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from IPython.core.interactiveshell import InteractiveShell


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    from tests import doors
    from tests.kernel import fakes

    monkeypatch.setattr(catalog, "INSTRUMENTS", dict(catalog.INSTRUMENTS))
    fakes.register()
    with doors.in_process_shell() as shell:
        yield shell


def test_the_report_is_printed(terminal: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    result = terminal.run_cell("%%one -o kept\nthreads = __import__('threading').active_count()\n41 + 1", store_history=True)
    said = capsys.readouterr().out
    assert result.result == 42
    assert said.index("42") < said.index("verdict of one") < said.index("alpha")
    assert "<" not in said
    assert terminal.user_ns["threads"] == threading.active_count()


def test_live_and_widgets_are_text(terminal: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.run_cell("%%one -w --live\nimport time\ntime.sleep(0.5)")
    assert capsys.readouterr().out.count("verdict of one") == 1
    terminal.run_cell("%torchdebug display")
    assert "text, at the cell's end" in capsys.readouterr().out


def test_the_last_session_and_show(terminal: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    assert torchdebug_magics.last_session() is None
    terminal.run_cell("%%one -q\n1")
    session = torchdebug_magics.last_session()
    assert session is not None
    assert session.bad == {"output": "one"}
    capsys.readouterr()
    torchdebug_magics.show(session.report)
    assert "alpha" in capsys.readouterr().out


def test_without_ipython(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.kernel.fakes import one
    from tests.kernel.fakes.one.report import FakeReport

    monkeypatch.setitem(catalog.INSTRUMENTS, "one", one.__name__)
    assert torchdebug_magics.last_session() is None
    torchdebug_magics.show(FakeReport(name="x"))
    assert "alpha" in capsys.readouterr().out
