"""A page as text, for terminals and ``text/plain``: the verdict first, aligned tables, at most 100 columns of prose."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchdebug_magics.format import cell, one_line, share, sparkline
from torchdebug_magics.html.markup import details, leads_on, level, shares
from torchdebug_magics.html.page import Areas, Bars, Block, Boxes, Chart, Code, Facts, Fold, Heatmap, Meters, Note, Page, Table, Verbatim
from torchdebug_magics.html.pictures import describe, describe_areas, describe_heatmap, heat_lines, totals
from torchdebug_magics.html.style import STATUS
from torchdebug_magics.report import Gauge

_WIDTH = 100
_ROWS = 12
_TREE_ROWS = 60
"""A tree is read from the top, where a list is looked up."""
_BAR = 16


def render(page: Page) -> str:
    """The headline, then the blocks, an empty line between them."""
    look = STATUS[page.status]
    headline = _wrapped(page.headline, first=f"[{look.symbol} {look.word}] ", indent="  ")
    return "\n\n".join(text for text in (headline, *map(_block, page.blocks)) if text)


def _block(block: Block) -> str:
    return (
        "\n\n".join((f"{one_line(block.title)}:", *map(_block, block.blocks))) if isinstance(block, Fold) else _WRITERS[type(block)](block)
    )


def _note(block: Note) -> str:
    look = STATUS[block.status]
    return _wrapped(block.text, first=f"{look.symbol} {look.word}: ", indent="  ")


def _facts(block: Facts) -> str:
    if not block.rows:
        return ""
    names = max(len(name) for name, _ in block.rows) + 2
    rows = [_wrapped(value, first=f"{name:<{names}}", indent=" " * names) for name, value in block.rows]
    return "\n".join([one_line(block.title), *rows] if block.title else rows)


def _code(block: Code) -> str:
    width = max((len(str(number)) for number, _ in block.lines), default=1)
    lines = [f"{'->' if number == block.marked else '  '} {number:>{width}} | {one_line(text)}" for number, text in block.lines]
    if block.underlined is not None:
        first, end = block.underlined
        at = next(position for position, (number, _) in enumerate(block.lines) if number == block.marked)
        lines.insert(at + 1, f"{' ' * (width + 6 + first)}{'^' * (end - first)}")
    return "\n".join([one_line(block.title), *lines] if block.title else lines)


def _table(block: Table) -> str:
    if not block.rows:
        return ""
    shown = block.shown(_ROWS, _TREE_ROWS)

    def name(position: int) -> str:
        return block.label(position, closed=position + 1 not in shown) if block.tree else block.text(position)[0]

    texts = [tuple(map(one_line, block.columns)), *((name(position), *block.text(position)[1:]) for position in shown)]
    marks = ["  ", *("->" if position in block.marked else "  " for position in shown)]
    aligned: list[list[str]] = []
    for column, cells in zip(block.columns, zip(*texts, strict=True), strict=True):
        width = max(map(len, cells))
        aligned.append([text.ljust(width) if block.is_text(column) else text.rjust(width) for text in cells])
    bands = ["\n".join(map(_line, marks, *band)) for band in _bands(aligned)]
    left_out = len(block.rows) - len(shown)
    return "\n".join([one_line(block.caption), "\n\n".join(bands), *([f"   {left_out:,} more, see the report"] if left_out else [])])


def _bars(block: Bars) -> str:
    width = max(map(len, block.labels), default=0)
    parts = [one_line(block.title)]
    for measure in block.measures:
        lines = [one_line(measure.name)]
        longest = max(measure.values, default=0) or 1
        for label, value, part in zip(block.labels, measure.values, shares(measure), strict=True):
            bar = "█" * round(_BAR * value / longest) or ("▏" if value else "")
            lines.append(
                _line(f"  {one_line(label):<{width}}", f"{bar:<{_BAR}}", f"{cell(value, measure.format)} ({share(part)})" if value else "-")
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _boxes(block: Boxes) -> str:
    width = max((len(one_line(box.name)) for box in block.boxes), default=0)
    lines = [one_line(block.title)]
    for number, box in enumerate(block.boxes):
        start = f"  {STATUS[box.status].symbol} {one_line(box.name):<{width}}  "
        lines.append(_wrapped(box.text, first=start, indent=" " * (width + 6)))
        lines += [_wrapped(stop, first="  ✂ ", indent=" " * 6) for stop in box.stops]
        lines += ["  ↓"] if leads_on(block, number) else []
    return "\n".join(lines)


def _meters(block: Meters) -> str:
    width = max((len(gauge.label) for gauge in block.gauges), default=0)
    lines = (line for gauge in block.gauges for line in _meter_lines(gauge, width))
    return "\n".join(filter(None, [one_line(block.title), *lines]))


def _meter_lines(gauge: Gauge, width: int) -> list[str]:
    said, more = level(gauge), details(gauge)
    filled = round(_BAR * min(1.0, gauge.used_bytes / gauge.limit_bytes)) if gauge.limit_bytes else 0
    bar = f"{'█' * filled:░<{_BAR}}" if gauge.limit_bytes else " " * _BAR
    first = f"  {one_line(gauge.label):<{width}}  {bar}  {said}".rstrip() if said else f"  {one_line(gauge.label):<{width}}  {more}"
    indent = " " * (width + 4)
    return [first, _wrapped(more, first=indent, indent=indent)] if said and more else [_wrapped(first, first="", indent=indent)]


def _bands(columns: Sequence[list[str]]) -> list[list[list[str]]]:
    """Columns side by side as far as the width goes; each further band begins with the first column again."""
    bands = [[columns[0]]]
    for column in columns[1:]:
        if len(bands[-1]) > 1 and sum(len(other[0]) + 2 for other in [*bands[-1], column]) > _WIDTH:
            bands.append([columns[0]])
        bands[-1].append(column)
    return bands


def _line(*cells: str) -> str:
    return "  ".join(cells).rstrip()


def _wrapped(text: str, *, first: str = "", indent: str = "") -> str:
    return textwrap.fill(
        one_line(text), _WIDTH, initial_indent=one_line(first), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


_WRITERS: Mapping[type[Block], Callable[[Any], str]] = {
    Facts: _facts,
    Code: _code,
    Table: _table,
    Chart: lambda block: f"{_wrapped(describe(block))}\n  {sparkline(block.values, span=block.span)}",
    Areas: lambda block: f"{_wrapped(f'{block.title}: {describe_areas(block)}')}\n  {sparkline(totals(block))}",
    Bars: _bars,
    Boxes: _boxes,
    Heatmap: lambda block: "\n".join([_wrapped(describe_heatmap(block)), *map(one_line, heat_lines(block))]),
    Meters: _meters,
    Note: _note,
    Verbatim: lambda block: block.text,
}
"""Of each kind of block but folds."""
