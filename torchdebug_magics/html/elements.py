"""The one place where text becomes HTML: `el` builds an element and escapes all that is not `Markup` already."""

from __future__ import annotations

import html

__all__ = ["Markup", "el", "join", "prose"]

_VOID = frozenset({"br", "img", "wbr"})


class Markup(str):
    """HTML, made here and trusted as it stands."""

    __slots__ = ()


def el(tag: str, *children: str, **attributes: str | int) -> Markup:
    """``el("td", "a < b", style="color:red")``; an attribute that is an empty string is left out."""
    opening = "".join(f' {name}="{_escape(str(value))}"' for name, value in attributes.items() if value != "")
    return Markup(f"<{tag}{opening}>" if tag in _VOID else f"<{tag}{opening}>{join(children)}</{tag}>")


def join(parts: tuple[str, ...] | list[str]) -> Markup:
    """Parts one after the other, each escaped unless it is `Markup`."""
    return Markup("".join(part if isinstance(part, Markup) else _escape(part) for part in parts))


def prose(text: str, *, code_style: str = "") -> Markup:
    """A sentence in which what stands between backticks is code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return join([text])
    return join([el("code", piece, style=code_style) if odd % 2 else piece for odd, piece in enumerate(pieces)])


def _escape(text: str) -> str:
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"), quote=True).replace("\0", "\N{REPLACEMENT CHARACTER}")
