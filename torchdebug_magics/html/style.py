"""Inline literal styles that read on light and on dark, and survive the sanitizer of an untrusted notebook.

Text keeps the theme's own colour; what is tinted is half transparent. Only the badge sets a text colour, on a background of its own.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchdebug_magics.html.page import Status

_VOID = frozenset({"br", "img", "wbr"})


@dataclass(frozen=True)
class Look:
    """How a status shows: in a symbol and a word, then in colour."""

    symbol: str
    word: str
    solid: str
    """Behind white text."""
    tint: str
    """Behind the theme's text."""


STATUS: Mapping[Status, Look] = {
    "good": Look("✔", "fine", "#1a7f37", "rgba(46,160,67,.14)"),
    "bad": Look("✖", "problem", "#b3261e", "rgba(218,54,51,.14)"),
    "warn": Look("▲", "caution", "#8a5300", "rgba(210,153,34,.16)"),
    "info": Look("●", "note", "#2457a6", "rgba(84,134,214,.14)"),
    "busy": Look("○", "running", "#2457a6", "rgba(84,134,214,.14)"),
}


def colours(names: Sequence[str], known: Mapping[str, str], others: Sequence[str]) -> list[str]:
    """A colour for each name: the one that is known for it, or the next of `others`."""
    return [known.get(name, others[at % len(others)]) for at, name in enumerate(names)]


_LINE = "1px solid rgba(128,128,128,.35)"
PAGE = "max-width:1100px;margin:4px 0;line-height:1.45;overflow-wrap:break-word"
CARD = "padding:10px 14px;border-left:5px solid {solid};border-radius:4px;background:{tint}"
PILL = "display:inline-block;padding:1px 8px;margin-right:8px;border-radius:10px;font-weight:bold;font-size:85%"
BADGE = f"{PILL};color:#ffffff;background:{{solid}}"
NAME = "font-size:85%;opacity:.75"
VERDICT = "margin:6px 0 0 0;font-size:110%;font-weight:bold"
NOTE = "margin:8px 0;padding:4px 14px;border-left:3px solid {solid}"
BLOCK = "margin:10px 0;overflow:auto"
TABLE = "border-collapse:collapse;margin:0;width:max-content;max-width:100%"
CAPTION = "caption-side:top;text-align:left;font-weight:bold;padding:4px 0"
HEAD = f"text-align:{{side}};border-bottom:{_LINE};white-space:nowrap;vertical-align:bottom"
ROW_NAME = "text-align:left;font-weight:normal;font-family:monospace"
TEXT = "text-align:left;white-space:nowrap"
NUMBER = "white-space:nowrap"  # with its unit
PROSE = "text-align:left"
CODE_CELL = f"{PROSE};font-family:monospace;overflow-wrap:anywhere;min-width:14em"
MARKED = "background:rgba(218,54,51,.2)"
FACTS = "border-collapse:collapse;margin:0"
FACT_ROW = "background:transparent"  # no stripes of the theme's: they would tell rows apart that belong together
FACT_NAME = "text-align:left;vertical-align:top;white-space:nowrap;font-weight:bold;padding:3px 16px 3px 0"
FACT = "text-align:left;vertical-align:top;padding:3px 0"
CODE = f"margin:0;padding:8px 10px;border:{_LINE};border-radius:4px;overflow:auto;white-space:pre;font-family:monospace;line-height:1.5"
CODE_LINE = f"background:{STATUS['bad'].tint};font-weight:bold;display:inline-block;min-width:100%"
UNDERLINED = f"text-decoration:underline 2px {STATUS['bad'].solid};text-underline-offset:3px"
VERBATIM = "margin:6px 0;font-size:85%;white-space:pre-wrap;overflow-wrap:anywhere"
INLINE_CODE = "font-family:monospace;background:rgba(128,128,128,.16);padding:1px 4px;border-radius:3px"
IMAGE = "max-width:100%;height:auto"
IMAGE_OF_ROWS = "width:640px;max-width:none;height:{height}px;display:block"
CHART_ROW = "background:transparent"
CHART_IMAGE = "padding:0"
CHART_WORD = "text-align:{side};vertical-align:{edge};padding:0 6px;white-space:nowrap"
# Colours of lines: 3:1 and more on white and on near black.
CHART_LINE, CHART_BAD, CHART_FRAME = "#3d7fd9", "#e04b3f", "#808080"
AREAS = ("#3d7fd9", "#c77b1f", "#2f9e6e", "#9a63c9", "#c9588c", "#7f8c3a", "#808080")
STRIPES = ("#5b6fb5", "#b58a3c", "#a8524e", "#4f9d8f", "#8a8a8a")
# A kind of memory and a phase have the same colour in every report.
KINDS = {
    "parameter": "#3d7fd9", "optimizer state": "#c77b1f", "activation": "#2f9e6e", "gradient": "#9a63c9", "temporary": "#c9588c",
    "buffer": "#7f8c3a", "other": "#3b97ab", "held before the cell": "#808080",
}  # fmt: skip
PHASES = {
    "other": "#5b6fb5", "forward": "#b58a3c", "loss": "#9a7fb0", "backward": "#a8524e", "optimizer": "#4f9d8f",
    "steps only counted": "#8a8a8a",
}  # fmt: skip
HEAT = ("#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#d8e219", "#fde725")
HEAT_NAME = (
    "height:{height}px;line-height:{height}px;padding:0 8px 0 0;text-align:right;white-space:nowrap;font-family:monospace;font-size:11px"
)
HEAT_CELL = "padding:0;vertical-align:top;text-align:left"
HEAT_TEXT = "font-family:monospace;font-size:11px;line-height:15px;white-space:pre"
HEAT_ENDS = "display:flex;gap:1em;justify-content:space-between;font-size:85%"
KEY = "padding:4px 6px"
SWATCH = "background:{colour};border:1px solid rgba(128,128,128,.5)"
KEY_ENTRY = "white-space:nowrap;margin-right:14px;display:inline-block"
BAR = "width:{wide}px;height:12px;max-width:none;margin:0;vertical-align:middle"
BAR_CELL = "text-align:left;white-space:nowrap;min-width:{wide}px;padding:3px 6px 3px 12px"
BAR_WORD = "text-align:left;white-space:nowrap;padding:3px 12px 3px 0"
METER = "width:180px;height:16px;vertical-align:middle"
METER_CELL = "vertical-align:top;padding:3px 12px 3px 0"
METER_MORE = "font-size:85%;opacity:.8"
BOX = "padding:4px 12px;max-width:520px;border:1px solid {solid};border-left:5px solid {solid};border-radius:4px;background:{tint}"
BOX_SYMBOL = "white-space:pre"
BOX_NAME = "font-family:monospace"
BOX_TEXT = "font-size:90%"
GAP = "height:6px"
ARROW = "margin:0 0 0 20px;line-height:1.3"
STOP = f"margin:4px 0 4px 20px;padding:2px 10px;border-left:3px dashed {STATUS['bad'].solid}"
FOLD = "margin:10px 0"
SUMMARY = "cursor:pointer;padding:4px 0"
FROZEN = "torchdebug-frozen"
_CHILD = ".jp-OutputArea-child"
# Where JupyterLab and Notebook 7 show the outputs of a cell, a widget that is alive hides the frozen page before it. One that a new
# kernel does not have is bare text ("Loading widget...", "Error displaying widget"), and is hidden itself. Elsewhere both are seen.
BESIDE_WIDGET = (
    f"{_CHILD}:has(.{FROZEN}):has(+ {_CHILD} .widget-box){{display:none}}"
    f"{_CHILD}:has(.{FROZEN}) + {_CHILD}:not(:has(> .jp-OutputArea-output > *)){{display:none}}"
)


class Markup(str):
    """HTML, made here and trusted as it stands."""

    __slots__ = ()


def el(tag: str, *children: str, **attributes: str | int) -> Markup:
    """``el("td", "a < b", style="color:red")``; an attribute that is an empty string is left out."""
    opening = "".join(f' {name}="{_escape(str(value))}"' for name, value in attributes.items() if value != "")
    return Markup(f"<{tag}{opening}>" if tag in _VOID else f"<{tag}{opening}>{join(children)}</{tag}>")


def join(parts: Iterable[str]) -> Markup:
    """Parts one after the other, each escaped unless it is `Markup`."""
    return Markup("".join(part if isinstance(part, Markup) else _escape(part) for part in parts))


def prose(text: str) -> Markup:
    """A sentence in which what stands between backticks is code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return join([text])
    return join([el("code", piece, style=INLINE_CODE) if odd % 2 else piece for odd, piece in enumerate(pieces)])


def framed(caption: str, rows: Iterable[Markup], head: Sequence[Markup] = (), *, below: str = "") -> Markup:
    """A table and what stands below it; one without headings states facts, whose cells have their own padding."""
    whole = el(
        "table",
        el("caption", prose(caption), style=CAPTION) if caption else "",
        el("thead", el("tr", *head)) if head else "",
        el("tbody", *rows),
        style=TABLE if head else FACTS,
        cellpadding=4 if head else "",
    )
    return el("div", whole, below, style=BLOCK)


def _escape(text: str) -> str:
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"), quote=True).replace("\0", "\N{REPLACEMENT CHARACTER}")
