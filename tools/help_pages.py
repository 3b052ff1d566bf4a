"""Write docs/magics/: a page for each magic, from its own help, its options and its report. Run it after a change of these."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # of this checkout, whatever is installed

from torchdebug_magics import catalog, report  # noqa: E402
from torchdebug_magics.jupyter.arguments import MagicParser  # noqa: E402

if TYPE_CHECKING:
    from torchdebug_magics.instrument import Instrument

PAGES = ROOT / "docs/magics"
WRITTEN = "<!-- Written by tools/help_pages.py from the help of the magic. Change that, and run it. -->"
TERM = re.compile(r"(\S+) {2,}(\S.*)")
LATER = re.compile(r" {5,}(\S.*)")


def pages() -> dict[str, str]:
    """The text of each page, by the name of its file."""
    rows = tuple(catalog.instruments())
    made = {f"{row.name}.md": "\n\n".join([WRITTEN, *page(row)]) + "\n" for row in rows}
    listed = [(f"[`{row.magic}`]({row.name}.md)", row.summary) for row in rows]
    made["README.md"] = "\n\n".join([WRITTEN, "# The magics", table(("magic", "shows"), listed)]) + "\n"
    return made


def page(row: Instrument) -> Iterator[str]:
    """What is said of a magic, a block each."""
    yield f"# `{row.magic}`"
    yield f"{row.summary[0].upper()}{row.summary[1:]}."
    yield from prose(row.description)
    if (ROOT / f"notebooks/{row.name}.ipynb").exists():
        yield f"The notebook [`{row.name}.ipynb`](../../notebooks/{row.name}.ipynb) shows all of it at work."
    yield "## Options"
    yield table(("write", "to"), [(f"`{_cell(written)}`", _cell(said)) for written, said in MagicParser(row).rows])
    yield "## In a script"
    yield from script(row)
    yield "## The report"
    yield "What `-o NAME` keeps, and a session leaves in `session.report`. `to_dict()` and `to_json()` give it as plain values."
    yield from fields(row)


def script(row: Instrument) -> Iterator[str]:
    """How its function is called."""
    if row.watches:
        yield f"```python\nwith torchdebug_magics.{row.function}() as session:\n    train()\nprint(session.report.verdict)\n```"
    if row.examines and not row.takes_words and (row.subjects or not row.watches):
        values = row.subjects.lower().replace(" ", ", ")
        yield f"```python\nreport = torchdebug_magics.{row.function}({values})\n```"
    if keywords := [f"`{option.name}=`" for option in row.options]:
        yield f"Options are keywords: {', '.join(keywords)}."


def prose(text: str) -> Iterator[str]:
    """Markdown of a help's text: paragraphs, indented lines that are code, and terms with their meaning."""
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if all(line.startswith("    ") for line in lines):
            yield "```text\n" + "\n".join(line[4:] for line in lines) + "\n```"
        elif terms := _terms(lines):
            yield table(("name", "what"), [(f"`{_cell(name)}`", _cell(meaning)) for name, meaning in terms])
        else:
            yield "\n".join(lines)


def _terms(lines: Iterable[str]) -> list[tuple[str, str]]:
    """``name  meaning``, which may go on in indented lines; empty where one is neither."""
    found: list[tuple[str, str]] = []
    for line in lines:
        if term := TERM.fullmatch(line):
            found.append((term[1], term[2]))
        elif found and (later := LATER.fullmatch(line)):
            found[-1] = (found[-1][0], f"{found[-1][1]} {later[1]}")
        else:
            return []
    return found


def fields(row: Instrument) -> Iterator[str]:
    """Every field of its report, and of what that is made of, as the source tells."""
    statements = list(_statements(f"{catalog.INSTRUMENTS[row.function]}.report"))
    classes = [node for node in statements if isinstance(node, ast.ClassDef)]
    bases = {base.id for node in classes for base in node.bases if isinstance(base, ast.Name)}
    ordered = sorted(classes, key=lambda node: not node.name.endswith("Report"))  # what a user holds in hand comes first
    words = {name: values for name, values in map(_words, statements) if values}
    for node in ordered:
        if not node.name.startswith(("_", "Live")) and node.name not in bases and (rows := _own_and_inherited(node, classes)):
            yield f"### `{node.name}`"
            yield (ast.get_docstring(node) or "").replace("``", "`")
            yield table(("field", "type", ""), rows)
    for name, values in words.items():
        yield f"### `{name}`"
        yield f"One of {', '.join(f'`{value!r}`' for value in values)}."


def _statements(module: str) -> Iterator[ast.stmt]:
    """Of a module, and of those beside it from which it takes the types of its fields, and the bases of its classes."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    annotations = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    bases = [base for node in tree.body if isinstance(node, ast.ClassDef) for base in node.bases]
    types = {node.id for part in (*annotations, *bases) for node in ast.walk(part) if isinstance(node, ast.Name)}
    for node in tree.body:
        yield node
        if isinstance(node, ast.ImportFrom) and types & {alias.name for alias in node.names}:
            beside = node.module or ""
            if beside.startswith(module.rpartition(".")[0] + "."):
                yield from _statements(beside)


def _words(node: ast.stmt) -> tuple[str, list[object]]:
    """The name of an alias for words, and the words; of anything else, none."""
    if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Subscript)):
        return "", []
    is_literal = isinstance(node.value.value, ast.Name) and node.value.value.id == "Literal"
    return node.target.id, [one.value for one in ast.walk(node.value.slice) if isinstance(one, ast.Constant)] if is_literal else []


def _own_and_inherited(node: ast.ClassDef, beside: Sequence[ast.ClassDef]) -> list[tuple[str, str, str]]:
    """The fields of a class, and behind them those of its bases, beside it or in `report`, the same for all reports or all findings."""
    shared = [other for other in ast.parse(Path(report.__file__).read_text(encoding="utf-8")).body if isinstance(other, ast.ClassDef)]
    known = {other.name: other for other in (*shared, *beside)}
    rows = list(_fields(node))
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in known:
            inherited = _own_and_inherited(known[base.id], beside)
            rows += [row for row in inherited if row[0] not in {name for name, _, _ in rows}]
    return rows


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    for at, one in enumerate(node.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not one.target.id.startswith("_"):
            after = node.body[at + 1] if at + 1 < len(node.body) else None
            told = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield f"`{one.target.id}`", f"`{_cell(ast.unparse(one.annotation))}`", _cell(str(told))
        elif (
            isinstance(one, ast.FunctionDef)
            and not one.name.startswith("_")
            and any(isinstance(by, ast.Name) and by.id == "property" for by in one.decorator_list)
        ):
            yield f"`{one.name}`", f"`{_cell(ast.unparse(one.returns))}`" if one.returns else "", _cell(ast.get_docstring(one) or "")


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """In Markdown."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", r"\|")


def main() -> int:
    """Write those that differ, and name them."""
    PAGES.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        path = PAGES / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: written anew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
