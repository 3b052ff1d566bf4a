"""The result of a session: plain, frozen data that pins no memory, can be pickled, and prints as one sentence."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

TITLE_CHARS = 90
"""The longest title, without the line that it quotes."""
_WHERE_CHARS = 32
"""Of a longer name of a file, a title shows the end, so that the words keep their room."""
_QUOTE_CHARS = 72
_SHORTEST_CHARS = 24
"""Of a title that ends at a clause."""
_CLAUSE_ENDS = re.compile(r"[:;] |,? (?:and|so|but|which|because|where) | \(")


@dataclass(frozen=True, kw_only=True)
class Location:
    """A line of the user's code, numbered as in its cell or file."""

    cell: int | None
    """The ``n`` of ``In[n]``, or None outside a notebook cell."""
    file: str
    line: int
    """1-based, in the cell or file."""
    function: str
    source: str
    """The text of that line, stripped; empty if the source is unavailable."""

    def __str__(self) -> str:
        if self.cell is not None:
            return f"In[{self.cell}] line {self.line}"
        return self.place + (f" in {self.function}" if self.function.isidentifier() else "")

    @property
    def place(self) -> str:
        """Cell or file and line, without the function: ``In[4] line 7`` or ``model.py:31``."""
        if self.cell is not None:
            return f"In[{self.cell}] line {self.line}"
        name = self.file.replace("\\", "/").rsplit("/", 1)[-1]
        return f"{name}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change of the user's code."""

    cell: int | None
    """The ``n`` of ``In[n]``, or None outside a notebook cell."""
    file: str
    line: int
    """1-based, in the cell or file."""
    old: str
    """The whole statement that begins at `line`, dedented to its first line; empty where `new` is put before that line."""
    new: str
    """What replaces it; empty where the statement is deleted."""


FixState: TypeAlias = Literal["verified", "compiles", "advice"]
"""``verified``: run again with the edits, the fault was gone and nothing else broke. ``compiles``: the edited code parses, and each name in
it exists there. ``advice``: words."""
Status: TypeAlias = Literal["good", "bad", "warn", "info"]
"""``good``: nothing is wrong, and the watch covered the cell to its end. ``info``: nothing was found, but not all could be seen."""
Stage: TypeAlias = Literal["end", "fault", "remark", "symptom", "outcome"]
"""``end``: the finding explains how the cell ended. ``fault``: the code does what raises no error. ``remark``: what is true of a model, but
explains no end. ``symptom``: the effect of a fault. ``outcome``: it ended the cell, and has its cause in what went before."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What an instrument has found; each has its own kinds, and adds what it measures."""

    location: Location | None = None
    """The line to change."""
    fix: str = ""
    """What to change, for a person; empty where no fix is known."""
    edits: tuple[Edit, ...] = ()
    """The same as code; empty for advice."""
    fix_state: FixState = "advice"
    has_failed: bool = False
    """Whether a trial showed that the edits do not repair it; they are left out then."""

    @property
    def fix_at(self) -> Location | None:
        """The line that the fix changes."""
        return self.location

    @property
    def stage(self) -> Stage:
        """Where it stands between the cause and the end of the cell: of several findings, which explains which."""
        return "fault"


def located(headline: str, location: Location | None) -> str:
    """``h was overwritten · In[4] line 7: `h += 1```: a headline, the line of code that it concerns, and its text."""
    where = "" if location is None else f" · {location}"
    return f"{headline}{where}" + (f": `{location.source}`" if location is not None and location.source else "")


def short_title(headline: str, location: Location | None, *, shorter: str = "") -> str:
    """A headline with its line, short enough for the top of a page: without the function, and with the clauses that fit."""
    if location is None:
        return shortened(headline)
    where = str(location)
    if len(f"{headline} · {where}") > TITLE_CHARS:
        where = where.partition(" in ")[0]
    if shorter and len(f"{headline} · {where}") > TITLE_CHARS:
        headline = shorter
    if len(where) > _WHERE_CHARS and len(f"{headline} · {where}") > TITLE_CHARS:
        where = f"…{where[1 - _WHERE_CHARS :]}"
    headline = shortened(headline, TITLE_CHARS - len(f" · {where}"))
    source = location.source if len(location.source) <= _QUOTE_CHARS else f"{location.source[: _QUOTE_CHARS - 1]}…"
    return f"{headline} · {where}" + (f": `{source}`" if source else "")


def shortened(sentence: str, room: int = TITLE_CHARS) -> str:
    """The clauses of a sentence that fit into `room` characters; the beginning of the first one where none does."""
    if len(sentence) <= room:
        return sentence
    clauses = [sentence[: end.start()] for end in _CLAUSE_ENDS.finditer(sentence) if _SHORTEST_CHARS < end.start() <= room]
    whole = [clause for clause in clauses if clause.count("`") % 2 == 0]
    start = sentence[: room - 2].rstrip(" `")  # 2: the ellipsis, and the end of a quotation that is cut
    return whole[-1] if whole else f"{start}…" + "`" * (start.count("`") % 2)


def fits_a_title(headline: str) -> bool:
    """Whether it is short enough for the top of a page; the line of code that it quotes is not counted."""
    return len(headline.partition(": `")[0]) <= TITLE_CHARS


def own_traceback(calls: Iterable[Location], ends_in: str) -> list[str]:
    """A short traceback: the user's own calls, outermost first, then the line `ends_in`."""
    shown = [f"  {call}" + (f": {call.source}" if call.source else "") for call in calls]
    return ["Traceback of your own code (most recent call last):", *shown, ends_in]


@dataclass(frozen=True)
class Sharding:
    """The global shape of a sharded tensor, and the local shard of one process."""

    shape: tuple[int, ...]
    """The global shape."""
    local_shape: tuple[int, ...]
    """The shape of the local shard."""
    placements: tuple[str, ...]
    """One for each mesh dimension, such as ``"Shard(0)"`` or ``"Replicate()"``."""

    def __str__(self) -> str:
        whole, here = (" x ".join(map(str, sizes)) or "()" for sizes in (self.shape, self.local_shape))
        return f"{whole} as {', '.join(self.placements)}: {here} here"


@dataclass(frozen=True)
class Gauge:
    """Usage of one memory, such as a GPU's or a container's."""

    label: str
    used_bytes: int
    limit_bytes: int | None
    """None if there is no limit or it is unknown."""
    parts: tuple[tuple[str, int], ...] = ()
    """Components of `used_bytes`, by name."""
    note: str = ""
    """A remark on the numbers, or why there are none."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The memory at one moment that the user has named. What is of a device is None where none is in use."""

    label: str
    rank: int | None
    """Of this process in a distributed job."""
    rss_bytes: int
    limit: str
    """Whose limit comes nearest, such as ``"container limit"``; empty where none is known."""
    limit_used_bytes: int | None
    """By all that it counts."""
    limit_bytes: int | None
    device: str = ""
    """Torch's current one."""
    allocated_bytes: int | None = None
    max_allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    max_reserved_bytes: int | None = None
    max_is_new: bool = False
    """Whether the peak of what was allocated lies between the mark before and this one; else it is older, as counters are not reset."""
    driver_bytes: int | None = None
    """In use on the whole device, as its driver says."""
    unaccounted_bytes: int | None = None
    """Of that, neither torch's nor, where the driver tells, another process's: the context, NCCL, other libraries."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Base of every instrument's report."""

    problems: tuple[str, ...] = ()
    """What the instrument could not do or see, one line each."""
    notes: tuple[str, ...] = ()
    """How the report was made, where that needs a line: nothing is wrong with it."""
    cut_short: str = ""
    """The type of the exception that ended the cell before its end; empty where the watch covers all of it."""

    @property
    def verdict(self) -> str:
        """One sentence that a person can act on: what happened, where, and what to change."""
        raise NotImplementedError

    @property
    def fix(self) -> str:
        """What to change first; empty where nothing is wrong, or no fix is known."""
        finding = self.main_finding()
        return "" if finding is None else finding.fix

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The same as code; empty for advice."""
        finding = self.main_finding()
        return () if finding is None else finding.edits

    @property
    def fix_state(self) -> FixState:
        """How far the fix was tried."""
        finding = self.main_finding()
        return "advice" if finding is None else finding.fix_state

    @property
    def status(self) -> Status:
        """Whether anything is wrong, in a word."""
        return "info"

    def main_finding(self) -> Finding | None:
        """The finding that the verdict names: the first of the report, unless a report of that kind chooses another."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Finding):
                    return part
        return None

    def main_stage(self) -> Stage | None:
        """Where what was found stands between the cause and the end of the cell; None where nothing was."""
        finding = self.main_finding()
        return None if finding is None else finding.stage

    @property
    def title(self) -> str:
        """What happened and where, for a page on which the fix and the reason have rows of their own."""
        return self.verdict

    def __str__(self) -> str:
        return self.verdict

    def to_dict(self) -> dict[str, Any]:
        """Fields and properties as plain dicts, lists, strings and numbers, the verdict first; bytes are base64-encoded."""
        return {"verdict": self.verdict, **_plain(self)}

    def to_json(self, *, indent: int | None = 2) -> str:
        """Strict JSON: non-finite numbers become the strings ``"nan"``, ``"inf"`` and ``"-inf"``, complex ones as text."""
        return json.dumps(_json_safe(self.to_dict()), indent=indent, allow_nan=False, ensure_ascii=False)


FindingT = TypeVar("FindingT", bound=Finding)
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
"""Most of what a report holds, and nothing is in it."""


@dataclass(frozen=True, kw_only=True)
class FindingsReport(Report, Generic[FindingT]):
    """Base of a report that consists of findings, and is one sentence on the first of them, or on what was checked."""

    findings: tuple[FindingT, ...] = ()
    """The one that explains the others comes first."""
    sentence: str = ""
    """The verdict, written when the session ended."""
    alternatives: tuple[FindingT, ...] = ()
    """Findings that hold if their fix mends the cell: `%%torchdebug` tries them."""

    def main_finding(self) -> FindingT | None:
        """The first of `findings`."""
        return self.finding

    @property
    def found(self) -> bool:
        """Whether there is a finding."""
        return bool(self.findings)

    @property
    def finding(self) -> FindingT | None:
        """The first of `findings`."""
        return self.findings[0] if self.findings else None

    @property
    def verdict(self) -> str:
        """The finding in one sentence, or what was checked."""
        return self.sentence


def parts_of(value: object) -> Iterator[object]:
    """A value, and all that a report may hold in it, at any depth: fields, items, the values of mappings."""
    todo = [value]
    while todo:
        part = todo.pop()
        yield part
        if type(part) not in _PLAIN:
            todo += reversed(_inside(part).values())


def changed(value: Any, change: Callable[[Any], Any], done: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """A value with ``change(part)`` in place of each part, from the outermost on; what is held twice stays one object.

    What is not changed stays the same object, too.
    """
    if type(value) in _PLAIN:
        return change(value)
    done = {} if done is None else done
    if id(value) not in done:
        new = change(value)
        before = _inside(new)
        after = {key: changed(part, change, done) for key, part in before.items()}
        if any(after[key] is not part for key, part in before.items()):
            new = _with_inside(new, after)
        done[id(value)] = value, new  # the value, too: the number of an object that is gone may be another's
    return done[id(value)][1]


def _inside(value: Any) -> dict[Any, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Mapping):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, (tuple, list)) else {}


def _with_inside(value: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(value, Mapping):
        return parts
    if isinstance(value, (tuple, list)):
        return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())
    return dataclasses.replace(value, **parts)


def _names(kind: type[Any]) -> list[str]:
    """All that a value of ours has to say: its fields, then its properties."""
    properties = [name for base in reversed(kind.__mro__) for name, value in vars(base).items() if isinstance(value, property)]
    return [field.name for field in dataclasses.fields(kind)] + [name for name in dict.fromkeys(properties) if not name.startswith("_")]


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: _plain(part) for name, part in zip(value._fields, value, strict=True)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, (Sequence, AbstractSet)) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_safe(item) for item in value]
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
