from __future__ import annotations

import pytest

from torchdebug_magics.jupyter.cell import MagicLines

READ = MagicLines({"one": 1, "two": 2})
ONE = "get_ipython().run_cell_magic('one', '', None)\n"
TWO = ONE.replace("'one'", "'two'")


@pytest.mark.parametrize(
    ("cell", "read"),
    [
        ("%%one\nx\n", f"{ONE}x\n"),
        ("%%one\n", ONE),
        ("# a\n\n%%one\nx\n", f"# a\n\n{ONE}x\n"),
        ("%%one -o x # y\n", ONE.replace("''", "'-o x # y'")),
        ("%%one\n# a\n%%two\nx\n", f"{ONE}# a\n{TWO}x\n"),
        ("%%one\n  x\n  y\n", f"{ONE}x\ny\n"),
        ("%%one\n%%time\nx\n", f"{ONE}get_ipython().run_cell_magic('time', '', 'x\\n')\n"),
        ("%%one --help\nx\n", ONE.replace("''", "'--help'")),
    ],
)
def test_our_lines_are_calls(cell: str, read: str) -> None:
    assert "".join(READ(cell.splitlines(keepends=True))) == read


@pytest.mark.parametrize(
    "cell", ["x\n%%one\n", "%%time\n%%one\n", "%%one?\n", "%one\n", "%%onetwo\nx\n", "s = '''\n%%one\n'''\n", "# only\n", "%%\nx\n"]
)
def test_all_else_is_untouched(cell: str) -> None:
    assert "".join(READ(cell.splitlines(keepends=True))) == cell
