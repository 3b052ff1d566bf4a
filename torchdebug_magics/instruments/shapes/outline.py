"""The table of a report: its rows as a tree by module path, in which blocks that repeat are folded into one, and the columns.

A column says something of a module call; a user may name it in several ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchdebug_magics.errors import TorchDebugError, refuse
from torchdebug_magics.format import Format, listed, shape
from torchdebug_magics.instruments.shapes.report import Layout, Row, Shape, ShapesReport

NEVER_CALLED = "never called"
_LONGEST_PERIOD = 8
"""How many siblings may repeat together, such as a convolution and its norm, kept in two lists and called in turn."""


@dataclass(frozen=True)
class Node:
    """One module call, or several alike that stand as one."""

    rows: tuple[Row, ...]
    names: tuple[str, ...]
    """The names of its path; where several are folded, one reads ``"0 … 5"``."""
    inside: tuple[Node, ...]
    kind: int
    """Equal for nodes that do the same with parameters of the same size."""
    work: int
    """Equal for nodes that do the same, whatever was counted before."""
    params: int
    trainable: int
    """The sum over all rows, submodules included."""

    @property
    def first(self) -> Row:
        """The row that speaks for all."""
        return self.rows[0]

    @property
    def calls(self) -> int | str:
        """The number of its call, or of the calls that are folded."""
        first, last = self.rows[0].call, self.rows[-1].call
        return first if first == last else f"{first} … {last}"

    @property
    def modules(self) -> int:
        """The number of different modules that are folded; fewer than rows where one was called several times."""
        return len({row.path for row in self.rows})

    @property
    def flops(self) -> int:
        """The sum over all rows, submodules included."""
        return sum(row.flops for row in self.rows)

    @property
    def activation_bytes(self) -> int:
        """The sum over all rows, submodules included."""
        return sum(row.activation_bytes for row in self.rows)

    @property
    def own_params(self) -> int:
        """The sum over all rows, without submodules."""
        return sum(row.own_params for row in self.rows)

    def per_module(self, total: int) -> int:
        """The part of a total of parameters that one of the folded modules has."""
        return total // self.modules

    def per_call(self, total: int) -> int:
        """The part of a total of FLOPs or bytes that one of the folded calls has, on average."""
        return round(total / len(self.rows))


@dataclass(eq=False)
class _Draft:
    row: Row
    inside: list[_Draft]


def outline(report: ShapesReport, *, folded: bool = True) -> tuple[Node, ...]:
    """The roots; a module that was never called stands as the last of those around it."""
    kinds: dict[Hashable, int] = {}
    broken = failing(report)
    grown = tuple(_grown(draft, broken, kinds, folded) for draft in _drafts(report))
    return _fold(grown) if folded else grown


def walk(nodes: Sequence[Node], above: tuple[Node, ...] = ()) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Every node with those it stands in, in order."""
    for node in nodes:
        yield node, above
        yield from walk(node.inside, (*above, node))


def failing(report: ShapesReport) -> Row | None:
    """The call in which the forward failed."""
    if report.failure is None:
        return None
    return next((row for row in reversed(report.rows) if not row.output_shapes and row.path == report.failure.module), None)


def _drafts(report: ShapesReport) -> list[_Draft]:
    """Each row goes into the latest one whose path begins its own."""
    roots: list[_Draft] = []
    latest: dict[str, _Draft] = {}
    open_: list[_Draft] = []
    for row in report.rows:
        while open_ and open_[-1].row.path not in paths_above(row.path):
            open_.pop()
        draft = latest[row.path] = _Draft(row, [])
        (open_[-1].inside if open_ else roots).append(draft)
        open_.append(draft)
    for path in report.unused:
        missing = _Draft(Row(path=path, type="", call=0, depth=path.count(".") + 1, note=NEVER_CALLED), [])
        around = next((latest[outer] for outer in paths_above(path) if outer in latest), None)
        (around.inside if around is not None else roots).append(missing)
    return roots


def paths_above(path: str) -> Iterator[str]:
    """The paths of the modules around one, the nearest first; the empty one of the root is the last."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _grown(draft: _Draft, broken: Row | None, kinds: dict[Hashable, int], folded: bool) -> Node:
    row = draft.row
    names = tuple(row.path.split(".")) if row.path else ()
    inside = tuple(_grown(child, broken, kinds, folded) for child in draft.inside)
    inside = _fold(inside) if folded else inside
    relative = [child.names[len(names) :] for child in inside]
    does = (row.type, row.input_shapes, row.output_shapes, row.output_names, row.dtype, row.device, row.formula, row is broken)
    works = tuple((name, child.work, len(child.rows)) for name, child in zip(relative, inside, strict=True))
    work = kinds.setdefault(("work", does, works), len(kinds))
    holds = (row.own_params, row.trainable_params, row.note, tuple(child.kind for child in inside))
    kind = kinds.setdefault(("kind", work, holds), len(kinds))
    params = row.own_params + sum(child.params for child in inside)
    trainable = row.trainable_params + sum(child.trainable for child in inside)
    return Node((row,), names, inside, kind, work, params, trainable)


def _fold(siblings: Sequence[Node]) -> tuple[Node, ...]:
    """Those that repeat one after the other, alone or some in turn, become one."""
    nodes: list[Node] = []
    at = 0
    while at < len(siblings):
        repeats = [(period, _repeats(siblings, at, period)) for period in range(1, _LONGEST_PERIOD + 1)]
        period, times = max(repeats, key=lambda repeat: math.prod(repeat) * (repeat[1] > 1))
        nodes += [_merged([siblings[at + turn * period + part] for turn in range(times)]) for part in range(period)]
        at += period * times
    return tuple(nodes)


def _repeats(siblings: Sequence[Node], at: int, period: int) -> int:
    """How often the `period` nodes from `at` on stand there, each time one number on."""
    times, start = 1, at + period
    while start + period <= len(siblings) and all(map(_follows, siblings[start - period : start], siblings[start : start + period])):
        times, start = times + 1, start + period
    return times


def _follows(earlier: Node, later: Node) -> bool:
    if earlier.names == later.names:  # the same module, called again
        return earlier.work == later.work and later.first.call == earlier.rows[-1].call + 1
    return earlier.kind == later.kind and earlier.first.call == later.first.call and _numbered(earlier, later) is not None


def _numbered(earlier: Node, later: Node) -> int | None:
    """Where the paths differ, if they do in one number that goes up by one."""
    if len(earlier.names) != len(later.names):
        return None
    differs = [at for at, (a, b) in enumerate(zip(earlier.names, later.names, strict=True)) if a != b]
    if len(differs) != 1:
        return None
    a, b = earlier.names[differs[0]], later.names[differs[0]]
    return differs[0] if a.isdigit() and b.isdigit() and int(b) == int(a) + 1 else None


def _merged(nodes: Sequence[Node]) -> Node:
    if len(nodes) == 1:
        return nodes[0]
    at = _numbered(nodes[0], nodes[1])
    joined = _zipped(nodes)
    return joined if at is None else _renamed(joined, at, f"{nodes[0].names[at]} … {nodes[-1].names[at]}")


def _zipped(nodes: Sequence[Node]) -> Node:
    return replace(
        nodes[0],
        rows=tuple(row for node in nodes for row in node.rows),
        inside=tuple(_zipped(parts) for parts in zip(*(node.inside for node in nodes), strict=True)),
        params=sum(node.params for node in nodes),
        trainable=sum(node.trainable for node in nodes),
    )


def _renamed(node: Node, at: int, name: str) -> Node:
    names = (*node.names[:at], name, *node.names[at + 1 :])
    return replace(node, names=names, inside=tuple(_renamed(child, at, name) for child in node.inside))


class Column(NamedTuple):
    """One column; a value of None is a dash."""

    name: str
    format: Format
    value: Callable[[Node, Whole], str | int | float | None]


class Whole(NamedTuple):
    """What a cell may have to know of the whole report."""

    flops: int
    on_several_devices: bool
    broken: Row | None


def whole(report: ShapesReport) -> Whole:
    """Gathered once, for all cells."""
    return Whole(report.total_flops, len({row.device for row in report.rows if row.device}) > 1, failing(report))


def full_name(node: Node) -> str:
    """The path, the root by its type, and how many are folded."""
    name = ".".join(node.names) or node.first.type
    many = len(node.rows)
    return f"{name}  (x {many})" if many > 1 and any(not part.isdigit() and part[:1].isdigit() for part in node.names) else name


def shapes(sizes: Sequence[Shape], names: Sequence[str] = ()) -> str:
    """``logits 2 x 5 x 2, hidden[0] 2 x 5 x 8 and 11 more``."""
    known = names if len(names) == len(sizes) else [""] * len(sizes)
    texts = [f"{name} {shape(lengths)}".lstrip() for name, lengths in zip(known, sizes, strict=True)]
    return listed(texts)


def _kind(node: Node, everything: Whole) -> str | None:
    row = node.first
    return (f"{row.dtype} on {row.device}" if everything.on_several_devices and row.device else row.dtype) or None


def _note(node: Node, everything: Whole) -> str:
    """Without what the table shows anyway: that a call is not the first, and that those around a failure did not return either."""
    broken = ["failed here"] if any(row is everything.broken for row in node.rows) else []
    return ", ".join([*broken, *(part for part in node.first.note.split(", ") if part not in _KNOWN)])


COLUMNS = (
    Column("module", "text", lambda node, _: full_name(node)),
    Column("type", "text", lambda node, _: node.first.type or None),
    Column("call", "count", lambda node, _: node.calls or None),
    Column("input", "text", lambda node, _: node.first.input_formula or shapes(node.first.input_shapes) or None),
    Column("output", "text", lambda node, _: node.first.formula or shapes(node.first.output_shapes, node.first.output_names) or None),
    Column("dtype", "text", _kind),
    Column("params", "count", lambda node, _: node.per_module(node.params) or None),
    Column("own params", "count", lambda node, _: node.per_module(node.own_params) or None),
    Column("trainable", "count", lambda node, _: node.per_module(node.trainable) or None),
    Column("FLOPs", "count", lambda node, _: node.per_call(node.flops) or None),
    Column(
        "share of FLOPs", "share", lambda node, total: node.flops / len(node.rows) / total.flops if node.flops and total.flops else None
    ),
    Column("activations", "bytes", lambda node, _: node.per_call(node.activation_bytes) or None),
    Column("shards", "text", lambda node, _: listed([f"{name} {sharding}" for name, sharding in node.first.shards.items()]) or None),
    Column("note", "prose", _note),
)
_KNOWN = frozenset({"", "called before", "did not return"})
_BY_NAME = {column.name: column for column in COLUMNS}
_ALSO = {
    "calls": "call",
    "class": "type",
    "compute": "FLOPs",
    "device": "dtype",
    "layer": "module",
    "memory": "activations",
    "name": "module",
    "parameters": "params",
    "path": "module",
    "saved": "activations",
    "shapes": "output",
    "weights": "params",
}


def layout(*, depth: int | None = None, columns: str = "", sort: str = "", plot: bool = False, **_: object) -> Layout:
    """From the options of the magic; the columns by their own names."""
    refuse(depth is not None and depth < 0, f"--depth must be 0 or more, not {depth}: 0 shows the model alone")
    named = tuple(map(column_named, columns.replace(",", " ").split()))
    return Layout(depth=depth, columns=named, sort=column_named(sort) if sort else "", plot=plot)


def column_named(word: str) -> str:
    """The column that is meant: ``flops``, ``Own-Params`` and ``act`` are understood."""
    letters = _letters(word)
    known = {_letters(name): name for name in _BY_NAME} | _ALSO
    if letters in known:
        return known[letters]
    meant = {column for name, column in known.items() if letters and name.startswith(letters)}
    if len(meant) == 1:
        return meant.pop()
    msg = f"there is no column {word!r}; the columns are {', '.join(name.replace(' ', '-') for name in _BY_NAME)}"
    raise TorchDebugError(msg)


def chosen(report: ShapesReport, nodes: Sequence[Node]) -> tuple[Column, ...]:
    """The requested columns, else those that hold any information."""
    if report.layout.columns:
        names = dict.fromkeys(("module", *map(column_named, report.layout.columns)))
        return tuple(_BY_NAME[name] for name in names)
    everything = whole(report)
    return tuple(column for column in COLUMNS if column.name == "module" or _tells(column, report, nodes, everything))


def _tells(column: Column, report: ShapesReport, nodes: Sequence[Node], everything: Whole) -> bool:
    values = {column.value(node, everything) for node in nodes} - {None, ""}
    match column.name:
        case "call":
            return values != {1} and bool(values)
        case "share of FLOPs":  # follows from FLOPs, and makes the table wider than a narrow page
            return False
        case "dtype":
            return bool(values) and not common_kind(report)
        case "own params":  # shown where it differs: a module without parts owns all that it has
            return any(node.inside and node.own_params for node in nodes)
        case "trainable":
            return report.trainable_params != report.total_params
    return bool(values)


def common_kind(report: ShapesReport) -> str:
    """``float32 on cpu`` where all outputs are."""
    kinds = {(row.dtype, row.device) for row in report.rows if row.dtype}
    if len(kinds) != 1:
        return ""
    dtype, device = kinds.pop()
    return f"{dtype} on {device}" if device else dtype


def _letters(word: str) -> str:
    return "".join(letter for letter in word.casefold() if letter.isalnum())
