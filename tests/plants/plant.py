"""A planted fault, or a healthy cell that looks like one: the text of the cells, and what the report must say."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.report import Location

FIRST_LINE: Final = 2
"""Number of the first line of a text: the magic, or a comment in its place, is line 1."""
_MARKER: Final = re.compile(r"# <- (?P<names>[a-z]+(?:, [a-z]+)*)$")


@dataclass(frozen=True, kw_only=True, eq=False)
class Plant:
    """A cell under an instrument, and the truth about it. Two plants are equal only if they are the same object."""

    name: str
    instrument: str
    cell: str
    """The body. A line that ends in ``# <- here`` is a right answer to where; other names mark what else a report names."""
    setup: str = ""
    """A cell that runs before, without the magic."""
    subjects: tuple[str, ...] = ()
    """Expressions after the name of a line magic, as in ``%overfit model batch``, which runs after the cell.

    Without them, the magic stands above the cell.
    """
    options: Mapping[str, Any] = field(default_factory=dict)
    door: str = ""
    """The only door to judge it by, if the other cannot show what it is about."""
    expect: Mapping[str, Any]
    """Dotted attribute of the report -> its value, or a matcher. The first entry is the finding: None in a healthy plant."""
    repair: tuple[tuple[str, str], ...] = ()
    """(old, new) texts that make the cell healthy; one that does not occur in the cell is for the set-up."""
    raises: str = ""
    """The name of the exception of the user's own in which the cell may end."""
    fails: str = ""
    """An expression that is true after a plain run of the cell, without the instrument."""
    works: str = ""
    """An expression that is true after a plain run of the repaired cell; in a healthy plant, of the cell itself."""
    source: str = ""
    """The address of the public thread from which the plant was rebuilt."""
    needs: str = ""
    """A package without which the plant cannot run."""

    def __post_init__(self) -> None:
        for part in ("setup", "cell"):
            text = textwrap.dedent(getattr(self, part)).strip("\n")
            object.__setattr__(self, part, f"{text}\n" if text else "")

    def __repr__(self) -> str:
        return f"<Plant {self.id}>"

    @property
    def id(self) -> str:
        """The name, after that of the instrument: what a test is called, and selected by."""
        return f"{self.instrument}-{self.name}"

    @property
    def healthy(self) -> bool:
        """Whether there is nothing to find."""
        return next(iter(self.expect.values())) is None

    def marked(self, name: str = "here") -> frozenset[tuple[int, str]]:
        """The lines of the set-up and the cell with that name in their marker: the number as in a report, and the text."""
        lines = [numbered for part in (self.setup, self.cell) for numbered in enumerate(part.splitlines(), FIRST_LINE)]
        matches = ((number, line, _MARKER.search(line)) for number, line in lines)
        return frozenset((number, line.strip()) for number, line, match in matches if match and name in match["names"].split(", "))

    def repaired(self) -> Plant:
        """The plant with its repair, in which the finding is gone; ValueError where a text to be replaced is in neither cell."""
        setup, cell = self.setup, self.cell
        for old, new in self.repair:
            if old not in cell and old not in setup:
                msg = f"{self.id}: {old!r} is in neither cell"
                raise ValueError(msg)
            if old in cell:
                cell = cell.replace(old, new)
            else:
                setup = setup.replace(old, new)
        finding = next(iter(self.expect)).partition(".")[0]
        return dataclasses.replace(self, setup=setup, cell=cell, repair=(), expect={finding: None})


class Matcher:
    """What may stand in place of a value in `Plant.expect`."""

    def holds(self, value: Any, plant: Plant) -> bool:
        """Whether the value of the report is as expected."""
        raise NotImplementedError


@dataclass(frozen=True)
class AnyOf(Matcher):
    """One of several right answers, best first."""

    values: tuple[Any, ...]

    def holds(self, value: Any, plant: Plant) -> bool:
        return any(_holds(right, value, plant) for right in self.values)


@dataclass(frozen=True)
class Between(Matcher):
    """A number within bounds, both included."""

    low: float
    high: float

    def holds(self, value: Any, plant: Plant) -> bool:
        return isinstance(value, (int, float)) and self.low <= value <= self.high


@dataclass(frozen=True)
class Has(Matcher):
    """A text that contains all of these: strings literally, patterns by search."""

    parts: tuple[str | re.Pattern[str], ...]

    def holds(self, value: Any, plant: Plant) -> bool:
        return isinstance(value, str) and all(part in value if isinstance(part, str) else part.search(value) for part in self.parts)


@dataclass(frozen=True)
class Starts(Matcher):
    """A text that begins with this."""

    text: str

    def holds(self, value: Any, plant: Plant) -> bool:
        return isinstance(value, str) and value.startswith(self.text)


@dataclass(frozen=True)
class Ends(Matcher):
    """A text that ends with this."""

    text: str

    def holds(self, value: Any, plant: Plant) -> bool:
        return isinstance(value, str) and value.endswith(self.text)


@dataclass(frozen=True)
class SameSet(Matcher):
    """The same members, in any order."""

    values: frozenset[Any]

    def holds(self, value: Any, plant: Plant) -> bool:
        return value is not None and set(value) == self.values


@dataclass(frozen=True)
class Each(Matcher):
    """A sequence, perhaps an empty one, of which every member is as expected."""

    expected: Any

    def holds(self, value: Any, plant: Plant) -> bool:
        return all(_holds(self.expected, member, plant) for member in value)


@dataclass(frozen=True)
class Marked(Matcher):
    """The location of a line that carries this name in its marker."""

    name: str

    def holds(self, value: Location | None, plant: Plant) -> bool:
        return value is not None and (value.line, value.source) in plant.marked(self.name)


@dataclass(frozen=True)
class Filled(Matcher):
    """Anything that is true, such as a text that is not empty."""

    def holds(self, value: Any, plant: Plant) -> bool:
        return bool(value)


HERE: Final = Marked("here")
FILLED: Final = Filled()


def any_of(*values: Any) -> AnyOf:
    return AnyOf(values)


def between(low: float, high: float) -> Between:
    return Between(low, high)


def has(*parts: str | re.Pattern[str]) -> Has:
    return Has(parts)


def starts(text: str) -> Starts:
    return Starts(text)


def ends(text: str) -> Ends:
    return Ends(text)


def same_set(*values: Any) -> SameSet:
    return SameSet(frozenset(values))


def each(expected: Any) -> Each:
    return Each(expected)


def mismatches(plant: Plant, report: Any) -> dict[str, str]:
    """Each attribute that is not as expected, with its value. Problems are expected in no report, unless the plant says otherwise."""
    return dict(_mismatches(plant, report))


def _mismatches(plant: Plant, report: Any) -> Iterator[tuple[str, str]]:
    for path, expected in {"problems": (), **plant.expect}.items():
        value, missing = report, ""
        for name in path.split("."):
            if not hasattr(value, name):
                missing = f"there is no {name!r} in {value!r}"
                break
            value = getattr(value, name)
        if missing or not _holds(expected, value, plant):
            yield path, f"{missing or repr(value)}, not {expected!r}"


def _holds(expected: Any, value: Any, plant: Plant) -> bool:
    return expected.holds(value, plant) if isinstance(expected, Matcher) else bool(value == expected)
