"""Judges what a row left under a door: as one plain run would, refused with its reason, or harm."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.writers import forms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.writers.outcome import Outcome, Run
    from tests.writers.writer import Writer

RERUNS = ("verify", "deterministic")
"""Doors that always run the cell again, so that what can only be refused must be."""
REFUSAL = re.compile(r"[^\n]*(?:--anyway|anyway=True)[^\n]*")
_OLD_REFUSAL = re.compile(r"[^\n]*(?:not compared|not rerun|not run again)[^\n]*", re.IGNORECASE)
_SPOKEN = re.compile(r"[^\n]*(?:not put back|could not be restored|is started again|not restored)[^\n]*", re.IGNORECASE)


@dataclass(frozen=True)
class Judgement:
    """What has become of a row under a door."""

    status: str
    """``equal``, ``refused``, ``refused without a name``, ``neither`` (must be refused), ``harm``, ``SILENT HARM`` or ``failed``."""
    reason: str = ""
    differs: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        return self.status in {"equal", "refused"}

    def __str__(self) -> str:
        return " · ".join(filter(None, (self.status, self.reason, *self.differs)))


def judged(run: Run, writer: Writer, door: str) -> Judgement:
    """Run the row under the door and without a magic, and compare."""
    plain, *others = (run(writer, name) for name in forms.baselines(door))
    outcome = run(writer, door)
    for each in (plain, *others, outcome):
        if each.failed:
            return Judgement("failed", each.failed.strip().splitlines()[-1])
    if plain.errors:
        return Judgement("failed", f"the plain cell raises {plain.errors[0]}")
    if door.startswith("overfit"):
        differs = tuple(_trained(outcome, plain, *others, cell=door == "overfit_cell"))
    else:
        differs = tuple(_differences(outcome, plain, variables=door in RERUNS))
    words = _all_words(outcome)
    refusal = REFUSAL.search(words) or _OLD_REFUSAL.search(words)
    reason = refusal[0].strip() if refusal else ""
    if differs:
        spoken = reason or (match[0].strip() if (match := _SPOKEN.search(words)) else "")
        return Judgement("harm" if spoken and _names(spoken, writer) else "SILENT HARM", spoken, differs)
    if reason:
        return Judgement("refused" if _names(reason, writer) else "refused without a name", reason)
    if writer.expect == "refused" and door in RERUNS:
        return Judgement("neither", f"equal, and no refusal is said: {outcome.verdict or outcome.errors}")
    return Judgement("equal")


def _all_words(outcome: Outcome) -> str:
    return "\n".join((outcome.verdict, *_strings(outcome.report), outcome.text, *outcome.errors))


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for each in value.values():
                yield from _strings(each)
        case list():
            for each in value:
                yield from _strings(each)


def _names(reason: str, writer: Writer) -> bool:
    words = {word for effect in writer.effects for word in effect.split() if word != "file"} | set(writer.named)
    return any(word.lower() in reason.lower() for word in words)


def _differences(outcome: Outcome, plain: Outcome, *, variables: bool) -> Iterator[str]:
    """What is not as after a plain run."""
    here, there = Counter(outcome.files), Counter(plain.files)
    if here != there:
        yield from _files(here, there)
    for name in ("cwd", "environ", "requests", "threads", "processes", "printed"):
        if getattr(outcome, name) != getattr(plain, name):
            yield f"{name} {getattr(outcome, name)!r}, plain {getattr(plain, name)!r}"
    for name in ("variables", "after") if variables else ():
        if (difference := _variables(getattr(outcome, name), getattr(plain, name))) and name == "variables":
            yield difference
        elif difference:
            yield f"after the last cell {difference}"


def _variables(here: dict[str, Any], there: dict[str, Any]) -> str:
    return ", ".join(
        f"`{name}` {here.get(name, 'absent')!r:.60}, plain {there.get(name, 'absent')!r:.60}"
        for name in sorted({*here, *there})
        if here.get(name, "absent") != there.get(name, "absent")
    )


def _files(here: Counter[tuple[str, ...]], there: Counter[tuple[str, ...]]) -> Iterator[str]:
    more, fewer = list((here - there).elements()), list((there - here).elements())
    for path in sorted({entry[0] for entry in (*more, *fewer)}):
        now = [entry[1:] for entry in more if entry[0] == path]
        then = [entry[1:] for entry in fewer if entry[0] == path]
        if now and then and len(now) == len(then):
            yield f"{path}: {_apart(now[0], then[0])}"
        else:
            yield f"{path}: {'a stray file' if now else 'missing'}{f' ({len(now)} more)' if len(now) > 1 else ''}"


def _apart(now: tuple[str, ...], then: tuple[str, ...], what: str = "plain") -> str:
    if now[:2] != then[:2]:
        return f"{' '.join(now[:2])}, {what} {' '.join(then[:2])}"
    at = max(0, next((i for i, pair in enumerate(zip(now[2], then[2], strict=False)) if pair[0] != pair[1]), len(then[2])) - 8)
    return f"{now[2][at:]!r:.60}, {what} {then[2][at:]!r:.60}"


def _trained(outcome: Outcome, plain: Outcome, before: Outcome, *, cell: bool) -> Iterator[str]:
    """What training on the row's step has left that neither no step nor one plain step leaves.

    A step under `%overfit` draws other numbers, so that of a new file name, kind and size are compared; one that was there before is
    byte by byte as before, or where the magic stands above the cell that writes, as after one plain run of it.
    """
    old, new = Counter(before.files), Counter(plain.files)
    paths = {entry[0] for entry in before.files}
    here = Counter(outcome.files)
    for path in sorted(paths):
        now, was, then = ([entry for entry in files.elements() if entry[0] == path] for files in (here, old, new))
        if sorted(now) not in (sorted(was), *([sorted(then)] if cell else [])):
            yield f"{path}: {_apart(now[0][1:], was[0][1:], 'before')}" if now else f"{path}: missing"
    kinds = Counter(entry[:2] for entry in new.elements() if entry[0] not in paths)
    stray = Counter(entry[:2] for entry in here.elements() if entry[0] not in paths) - kinds
    for path, kind in sorted(stray):
        yield f"{path}: a stray {kind}"
    sizes = {entry[0]: _size(entry[3]) for entry in plain.files}
    for path, _, _, content in outcome.files:
        if path not in paths and _size(content) > sizes.get(path, _size(content)) * 1.5 + 8:
            yield f"{path}: {_size(content)} bytes, plain {sizes[path]}"
    if outcome.requests > plain.requests:
        yield f"requests {outcome.requests}, plain {plain.requests}"
    for name in ("cwd", "environ", "threads", "processes"):
        if getattr(outcome, name) not in (getattr(plain, name), getattr(before, name)):
            yield f"{name} {getattr(outcome, name)!r}, before {getattr(before, name)!r}"


def _size(content: str) -> int:
    return int(match[1]) if (match := re.match(r"(\d+) bytes ", content)) else len(content)
