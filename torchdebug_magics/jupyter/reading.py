"""Read the leading ``%%name`` lines of a cell as calls that open sessions, so that the body stays ordinary code, run by IPython itself."""

from __future__ import annotations

from collections.abc import Collection

from IPython.core.inputtransformer2 import cell_magic, leading_indent

from torchdebug_magics.jupyter.arguments import without_comment

__all__ = ["MagicLines"]


class MagicLines:
    """An input transformer for the magics called `names`."""

    has_side_effects = True
    """So that a terminal that asks whether a cell is complete still sees ``%%name``, and waits for the body."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __call__(self, lines: list[str]) -> list[str]:
        """Each of our lines is replaced by one line, so that every line keeps its number."""
        read: list[str] = []
        found = False
        for at, line in enumerate(lines):
            name, arguments = _cell_magic_line(line)
            if name in self._names:
                found = True
                # A body of None says: the body is what follows in this cell.
                read.append(f"get_ipython().run_cell_magic({name!r}, {arguments!r}, None)\n")
                if {"-h", "--help"} & set(without_comment(arguments).split()):
                    return read
            elif line.strip() and not line.startswith("#"):
                # What IPython would do to the body if our lines were not there: another's cell magic, or an indented body.
                return [*read, *cell_magic(leading_indent(lines[at:]))] if found else lines
            else:
                read.append(line)
        return read


def _cell_magic_line(line: str) -> tuple[str, str]:
    if not line.startswith("%%"):
        return "", ""
    name, *arguments = [*line[2:].split(None, 1), ""][:2]
    return name, "".join(arguments).strip()
