"""A line of code with the fix written into it, and the fixes that are given as code."""

from __future__ import annotations

from typing import Any

import pytest

from torchdebug_magics.instruments.memtrace.held.leak_fixes import Cause, cleared_where_read, fix, rewritten
from torchdebug_magics.memory.paths import HolderPath
from torchdebug_magics.probing.source.user_code import location


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
        (
            "h = net.register_forward_hook(lambda m, i, o: kept.append(o))",
            "h = net.register_forward_hook(lambda m, i, o: kept.append(o.detach()))",
        ),
        ("h = net.register_forward_hook(lambda m, i, o: kept.update(o=o))", ""),
    ],
)
def test_a_line_with_its_cure(line: str, wanted: str) -> None:
    assert rewritten(line, ".detach()") == wanted


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("log.append(row)", "log.append({**row, 'loss': row['loss'].detach()})"),
        ("log.append({'loss': loss, 'n': n})", "log.append({'loss': loss.detach(), 'n': n})"),
        ("log.append({'total': total})", ""),
        ("log.append(made())", ""),
    ],
)
def test_a_line_with_its_cure_in_an_entry_of_a_dict(line: str, wanted: str) -> None:
    assert rewritten(line, ".detach()", "loss") == wanted
    kept = fix(
        HolderPath("log", ("[0]", "['loss']", ".grad_fn", " -> PowBackward0", ".saved_self")),
        Cause(keeps_graph=True, trains=True, line=line),
    )
    assert f"`{wanted}`" in kept if wanted else "store `.item()`" in kept


def test_a_path_as_python_has_it() -> None:
    assert HolderPath("net", (".1", ".x")).as_code == "net[1].x"
    assert HolderPath("blocks", (".0", ".attn", ".12")).variable == "blocks[0].attn[12]"


@pytest.mark.parametrize(("path", "dim", "wanted"), [("keys", 1, "`keys = keys[:, -1000:]`"), ("bank", 0, "`bank = bank[-1000:]`")])
def test_a_tensor_is_bounded_where_it_grows(path: str, dim: int, wanted: str) -> None:
    assert wanted in fix(HolderPath(path), Cause(keeps_graph=False, trains=False, swells=True, dim=dim))


def test_what_cannot_be_written_is_not_said() -> None:
    said: Any = fix(HolderPath("cache", (".layers", "[...]", ".keys")), Cause(keeps_graph=False, trains=False, swells=True, dim=2))
    assert "-1000" not in said


FILLED_AND_READ = """\
class Extractor:
    def __init__(self):
        self.handles = []
    def register(self, layers):
        for layer in layers:
            self.handles.append(layer.register_forward_hook(print))
    def clear(self):
        for handle in self.handles:
            handle.remove()
"""
NOT_CLEARED = {
    "emptied already": FILLED_AND_READ + "        self.handles = []\n",
    "read twice": FILLED_AND_READ + "    def count(self):\n        return sum(self.handles)\n",
    "drawn from": FILLED_AND_READ + "    def draw(self):\n        return random.sample(self.handles, 2)\n",
    "handed out": FILLED_AND_READ + "    def all(self):\n        return self.handles\n",
    "read in one place of it": FILLED_AND_READ + "    def last(self):\n        return self.handles[-1]\n",
}


def _cleared(shell: Any, text: str) -> tuple[str, tuple[Any, ...]]:
    assert shell.run_cell(text, store_history=True).success
    file = shell.user_ns["Extractor"].register.__code__.co_filename
    return cleared_where_read(HolderPath("extractor", (".handles", "[0]")), location(file, 6, "register"))


def test_a_list_is_cleared_where_it_is_read(shell: Any) -> None:
    fix, edits = _cleared(shell, FILLED_AND_READ)
    assert fix == "run `self.handles.clear()` in `clear`, after it was read"
    assert edits[0].new.endswith("handle.remove()\nself.handles.clear()")


@pytest.mark.parametrize("text", NOT_CLEARED.values(), ids=NOT_CLEARED)
def test_a_list_that_others_need_is_left_alone(text: str, shell: Any) -> None:
    assert _cleared(shell, text) == ("", ())
