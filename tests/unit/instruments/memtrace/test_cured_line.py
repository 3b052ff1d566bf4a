"""A line of code with the fix written into it, and the fixes that are given as code."""

from __future__ import annotations

from typing import Any

import pytest

from torchdebug_magics.instruments.memtrace.held.leak_fixes import Cause, fix, rewritten
from torchdebug_magics.memory.paths import HolderPath


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("total += loss", "total += loss.detach()"),
        ("total = total + a * b", "total = (total + a * b).detach()"),
        ("log['a'].append(loss)  # kept", "log['a'].append(loss.detach())"),
        ("log.append({'loss': loss})", ""),
        ("h, c = cell(a)", ""),
        ("for a in b: total += a", ""),
        ("log.append(loss", ""),
        ("h = net.register_forward_hook(lambda m, i, o: kept.append(o))", ""),
    ],
)
def test_a_line_with_its_cure(line: str, wanted: str) -> None:
    assert rewritten(line, ".detach()") == wanted


def test_a_path_as_python_has_it() -> None:
    assert HolderPath("net", (".1", ".x")).as_code == "net[1].x"
    assert HolderPath("blocks", (".0", ".attn", ".12")).variable == "blocks[0].attn[12]"


@pytest.mark.parametrize(("path", "dim", "wanted"), [("keys", 1, "`keys = keys[:, -1000:]`"), ("bank", 0, "`bank = bank[-1000:]`")])
def test_a_tensor_is_bounded_where_it_grows(path: str, dim: int, wanted: str) -> None:
    assert wanted in fix(HolderPath(path), Cause(keeps_graph=False, trains=False, swells=True, dim=dim))


def test_what_cannot_be_written_is_not_said() -> None:
    said: Any = fix(HolderPath("cache", (".layers", "[...]", ".keys")), Cause(keeps_graph=False, trains=False, swells=True, dim=2))
    assert "-1000" not in said
