"""Every report that a test makes is read as a user would read it: phrases that a reader stumbled over do not come back.

With ``TORCHDEBUG_WORDS_LOG=FILE`` each distinct report is also written to FILE, a line of JSON each, to be read through.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdebug_magics import catalog
from torchdebug_magics.html import plain
from torchdebug_magics.html.page import Code, Facts, Fold, Note, Table, Verbatim
from torchdebug_magics.ranks.report import RanksReport
from torchdebug_magics.report import Report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.html.page import Block, Page

__all__ = ["BANNED", "complaints", "read", "watch"]

BANNED = {
    r"\bslopes?\b": "derivative",
    r"\bshort way\b": "skip connection",
    r"\bturned\b(?! (on|off|into))": "permuted",
    r"\btold\b": "reported, shown, distinguished",
    r"\btaken down\b": "recorded",
    r"\basked of\b": "requested",
    r"\bgives? way\b": "fails",
    r"(?<!there )\b(is|are|was|were) no (?!longer|different|more|less)": "is not a, has no",
    r"\bthe world\b": "the state outside the cell",
    r"\bwhat is there\b": "the objects that exist",
    r"\bby chance alone\b": "by guessing",
    r"\bspoilt\b": "corrupted, non-finite",
    r"\bborn\b|\bbirth\b": "from op; source op",
    r"\britual\b": "determinism settings",
    r"\bnothing is left of\b": "all memory was released",
    r"\bat once: |\bless at once\b|\brefused at once\b": "a single allocation",
    r"\bnothing that is alive\b": "freeing live tensors would not",
    r"\bop of torch\b|\bop of torch's\b": "PyTorch op",
    r"\bof before\b": "from before the cell",
    r"\bthings? too late\b": "needs a restart",
    r"\bfurther runs? of\b": "reran the cell N times",
    r"\bby what it is\b": "by kind",
    r"\bgoes on from\b": "continues from",
    r"\bwas given other\b": "received different",
    r"\bran for real\b|\bruns for real\b": "the forward pass ran",
    r"\bcomes? through\b": "succeeds",
    r"\bother (numbers|data|values|rows|samples) than\b": "different … from",
    r"\bthe way (taken|it went|from (the|a))\b": "the branch taken, the path",
    r"\bof what was (made|set|held)\b": "allocations of this cell",
    r"\ball of what\b": "all settings",
    r"\bwhere a number will do\b": "if only the number is needed",
    r"\bgives? nothing back\b|\bgives? (them|it|that) back\b": "returns, releases",
    r"\bwas found that keeps it\b": "that keeps the memory",
    r"\bmore than the budget\b": "within the budget",
    r"\bthe model anew\b": "create the model again",
    r"\bpassed it on\b": "propagates it",
    r"\blook at what (enters|made|scales|writes)\b": "check the …",
    r"\bover nothing\b(?! but)|\bmean of nothing\b": "over an empty tensor",
    r"\bfrom below by\b": "clamp to",
    r"\bthrown away\b": "discarded",
    r"\bwent (another way|different ways|other ways)\b": "took different branches",
    r"\bwhich nothing seeded\b": "which is not seeded",
    r"\b(has|have) left it\b": "as the run left it",
    r"\bgave other (bits|numbers)\b": "gave different",
    r"\bnobody wrote\b|\bnobody has written\b": "uninitialized memory",
    r"\bis asleep in\b": "sleeps in",
}
"""What stood in a report, as a pattern, and what an engineer says in its place."""
READ = frozenset(
    {
        "autograd",
        "gradwatch",
        "overfit",
        "deterministic",
        "hangwatch",
        "nanhunt",
        "memclean",
        "memgauge",
        "memmark",
        "memtrace",
        "shapes",
        "shrink",
        "stepzero",
    }
)
"""Instruments whose reports are held to it."""
_ONE_PICTURE = frozenset({"autograd", "gradwatch", "overfit", "nanhunt"})
"""Instruments whose pages have at most one picture or table above the first fold."""
_LONGEST = 90
"""Characters of a headline before the line that it quotes."""
_LOG = os.environ.get("TORCHDEBUG_WORDS_LOG")


def complaints(text: str) -> list[str]:
    """Each banned phrase in a text, with what to say for it; code between backticks is the user's."""
    flat = " ".join(re.sub(r"`[^`]*`", "`…`", text).split())
    return [
        f"{match[0]!r} in '…{flat[max(0, match.start() - 40) : match.end() + 40]}…': say {better!r}"
        for phrase, better in BANNED.items()
        for match in re.finditer(phrase, flat, re.IGNORECASE)
    ]


def watch(made: list[Any]) -> list[Any]:
    """Adds every report that is made from now on to `made`; called again, in case a test has put the class back.

    There is no way back: a class whose ``__new__`` was deleted refuses the arguments that it took before.
    """

    def remember(cls: type, *_: object, **__: object) -> Any:
        new = object.__new__(cls)
        made.append(new)
        return new

    Report.__new__ = remember  # type: ignore[assignment, method-assign]
    return made


def read(made: list[Any], where: str) -> Iterator[str]:
    """What reads badly in the reports of one test, each text once."""
    seen = set()
    for one in made:
        row = catalog.instrument_of(one)
        try:
            page = None if row is None else row.page(one)
            text = "" if page is None else plain.render(_own_words(page))
        except Exception:  # a report that was cut short in its making, or one of a test of views that fail
            continue
        if row is None or page is None or text in seen:
            continue
        seen.add(text)
        if _LOG:
            line = {"test": where, "instrument": row.name, "verdict": one.verdict, "title": one.title, "text": text}
            with Path(_LOG).open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        if row.name in READ:
            yield from complaints(text)
            yield from _too_long(one.title)
            if not isinstance(one, RanksReport):  # its table of ranks stands above the page of one of them
                yield from _crowded(page) if row.name in _ONE_PICTURE else ()


def _too_long(title: str) -> Iterator[str]:
    """A headline of which more than `_LONGEST` characters stand before the line of code that it quotes."""
    before = re.split(r": `|: [^ ]+ = ", title, maxsplit=1)[0]
    if len(before) > _LONGEST:
        yield f"{len(before)} characters before the quoted line in {title!r}: at most {_LONGEST}"


def _crowded(page: Page) -> Iterator[str]:
    """A page with more above its first fold than one screen shows."""
    first = list(takewhile(lambda block: not isinstance(block, Fold), page.blocks))
    pictures = [block for block in first if not isinstance(block, (Facts, Code, Note))]
    if len(pictures) > 1 or any(isinstance(block, Verbatim) for block in first):
        yield f"{page.headline!r} has {', '.join(type(block).__name__ for block in first)} above its folds"


def _own_words(page: Page) -> Page:
    """A page without what it quotes of the user's."""
    return replace(page, blocks=tuple(_own_block(block) for block in page.blocks if not isinstance(block, (Code, Verbatim))))


def _own_block(block: Block) -> Block:
    if isinstance(block, Fold):
        return replace(block, blocks=tuple(_own_block(inner) for inner in block.blocks if not isinstance(inner, (Code, Verbatim))))
    if isinstance(block, Table):
        is_code = [block.format(column) == "code" for column in block.columns]
        rows = [tuple("" if code else value for code, value in zip(is_code, row, strict=True)) for row in block.rows]
        return replace(block, whole=None, rows=rows)
    return block
