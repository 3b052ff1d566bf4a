"""An instrument is a folder and one line: the one in CONTRIBUTING.md, added as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchdebug_magics
from tests import doors
from torchdebug_magics import catalog, instruments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from IPython.core.interactiveshell import InteractiveShell

ROOT = Path(__file__).parents[2]
FILE = re.compile(r"^```python\n# (callcount/\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BODY = "model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())\nmodel(torch.zeros(1, 2))"


@pytest.fixture
def callcount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    files = FILE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert [name for name, _ in files] == [f"callcount/{part}.py" for part in ("__init__", "report", "probe", "view")]
    (tmp_path / "callcount").mkdir()
    for name, text in files:
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(instruments, "__path__", [*instruments.__path__, str(tmp_path)])
    monkeypatch.setitem(catalog.INSTRUMENTS, "callcount", "torchdebug_magics.instruments.callcount")  # the one line
    yield catalog.instrument("callcount")
    for name in [name for name in sys.modules if name.startswith("torchdebug_magics.instruments.callcount")]:
        del sys.modules[name]
    vars(instruments).pop("callcount", None)


@pytest.fixture
def shell(callcount: Any, leak_guard: None) -> Iterator[InteractiveShell]:
    with doors.in_process_shell() as shell:
        shell.run_cell("import torch")
        yield shell


def test_it_is_a_magic(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell(f"%%callcount -o calls --kind ReLU\n{BODY}")
    assert "1 module call" in capsys.readouterr().out
    assert shell.user_ns["calls"].to_dict()["calls_count"] == 1
    shell.run_cell("%torchdebug")
    assert "how many modules a cell calls" in capsys.readouterr().out
    shell.run_cell("%%callcount --help\n")
    assert "count only modules of this class" in capsys.readouterr().out


def test_it_is_a_function(callcount: Any) -> None:
    with callcount() as session:
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())(torch.zeros(1, 2))
    assert session.report.verdict == "3 module calls"
    torchdebug_magics.show(session.report)
    with pytest.raises(TypeError, match="takes no positional values"):
        callcount(1.5)
    with pytest.raises(TypeError, match="has no option 'deep'; it has kind"):
        callcount(deep=1)
