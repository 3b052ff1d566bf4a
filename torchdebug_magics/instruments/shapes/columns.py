"""The columns of the table: what each says of a module call, and how a user may name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchdebug_magics.errors import TorchDebugError, refuse
from torchdebug_magics.format import Format, listed, shape
from torchdebug_magics.instruments.shapes.outline import Node, failing
from torchdebug_magics.instruments.shapes.report import Layout, Row, Shape, ShapesReport


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
