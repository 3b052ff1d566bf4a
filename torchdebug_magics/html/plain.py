"""A page as text, for terminals and ``text/plain``: the verdict first, aligned tables, at most 100 columns of prose."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from torchdebug_magics.format import cell, one_line, share, sparkline
from torchdebug_magics.html import heatmap, pictures
from torchdebug_magics.html.page import Areas, Bars, Boxes, Chart, Code, Facts, Fold, Heatmap, Meters, Note, Page, Table, Verbatim
from torchdebug_magics.html.pictures import describe
from torchdebug_magics.html.style import STATUS
from torchdebug_magics.html.table import details, leads_on, level, shares

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchdebug_magics.html.page import Block, Measure
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


def _block(block: Block) -> str:  # noqa: C901, PLR0911 - one for each kind
    match block:
        case Facts():
            return _facts(block) if block.rows else ""
        case Code():
            return _code(block)
        case Table():
            return _table(block) if block.rows else ""
        case Chart():
            return f"{_wrapped(describe(block))}\n  {sparkline(block.values, span=block.span)}"
        case Areas():
            return f"{_wrapped(f'{block.title}: {pictures.describe_areas(block)}')}\n  {sparkline(pictures.totals(block))}"
        case Bars():
            return _bars(block)
        case Boxes():
            return _boxes(block)
        case Heatmap():
            return "\n".join([_wrapped(heatmap.describe(block)), *map(one_line, heatmap.heat_lines(block))])
        case Meters():
            return _meters(block)
        case Note():
            look = STATUS[block.status]
            return _wrapped(block.text, first=f"{look.symbol} {look.word}: ", indent="  ")
        case Verbatim():
            return block.text
        case Fold():
            return "\n\n".join((f"{one_line(block.title)}:", *map(_block, block.blocks)))


def _facts(block: Facts) -> str:
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
    shown = _shown(block)
    texts = [tuple(map(one_line, block.columns)), *(_texts(block, position, position + 1 not in shown) for position in shown)]
    marks = ["  ", *("->" if position in block.marked else "  " for position in shown)]
    aligned = [_column(block, name, [row[column] for row in texts]) for column, name in enumerate(block.columns)]
    bands = ["\n".join(map(_line, marks, *band)) for band in _bands(aligned)]
    left_out = len(block.rows) - len(shown)
    return "\n".join([one_line(block.caption), "\n\n".join(bands), *([f"   {left_out:,} more, see the report"] if left_out else [])])


def _shown(block: Table) -> list[int]:
    if not block.tree:
        return block.order(_ROWS)[:_ROWS]
    seen = block.seen_first(_TREE_ROWS)
    return sorted({*seen[:_TREE_ROWS], *(at for at in seen if at in block.marked)})


def _texts(block: Table, position: int, closed: bool) -> tuple[str, ...]:
    name, *cells = block.text(position)
    return (block.label(position, closed=closed) if block.tree else name, *cells)


def _bars(block: Bars) -> str:
    width = max(map(len, block.labels), default=0)
    labels = [f"  {one_line(label):<{width}}" for label in block.labels]
    return "\n\n".join([one_line(block.title), *("\n".join([one_line(one.name), *_bar_lines(labels, one)]) for one in block.measures)])


def _bar_lines(labels: Sequence[str], one: Measure) -> Iterator[str]:
    longest = max(one.values, default=0) or 1
    for label, value, part in zip(labels, one.values, shares(one), strict=True):
        bar = "█" * round(_BAR * value / longest) or ("▏" if value else "")
        yield _line(label, f"{bar:<{_BAR}}", f"{cell(value, one.format)} ({share(part)})" if value else "-")


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


def _column(block: Table, name: str, texts: Sequence[str]) -> list[str]:
    width = max(map(len, texts))
    return [text.ljust(width) if block.is_text(name) else text.rjust(width) for text in texts]


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
        one_line(text),
        _WIDTH,
        initial_indent=one_line(first),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
