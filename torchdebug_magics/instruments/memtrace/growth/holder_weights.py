"""What each variable holds, weighed at some steps: growth that no line shows, as calls are seen only in the steps that are followed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.memtrace.growth.line_growth import Leak
from torchdebug_magics.instruments.memtrace.held.fixes import collection, is_local, is_made_once
from torchdebug_magics.instruments.memtrace.ledger.memory_census import ACTIVATION, OPTIMIZER_STATE
from torchdebug_magics.instruments.memtrace.ledger.sites import category

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.growth.loop_steps import Loop
    from torchdebug_magics.instruments.memtrace.held.keepers import Keepers
    from torchdebug_magics.instruments.memtrace.ledger.allocation_lines import Place
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Block

__all__ = ["Tally", "place_of"]

_FEWEST = 4
"""Things in a collection from which one may speak of growth that is not seen at each step."""
_FEWEST_LOOKS = 3


class Tally:
    """Of the collections that hold what was made in the cell."""

    def __init__(self) -> None:
        self._looks: list[tuple[int, Mapping[str, list[Block]]]] = []
        self._paths: dict[str, str] = {}
        """To the first thing in each."""

    def weigh(self, step: int, blocks: Iterable[Block], keepers: Keepers) -> None:
        """At the beginning of that step, or after the last one."""
        held: dict[str, list[Block]] = defaultdict(list)
        for block in blocks:
            path = keepers.of(block)
            name = collection(path)
            is_plain = block.role in {"", ACTIVATION} or (block.role == OPTIMIZER_STATE and not is_made_once(path))
            if name != path and is_plain and not keepers.are_bounded([block]):
                held[name].append(block)
                self._paths[name] = min(path, self._paths.get(name, path), key=lambda one: _order(one, name))
        self._looks.append((step, held))

    def steps_each(self) -> float:
        """In how many steps a collection got one thing more since the last look, of which nobody saw the making; 0 where none did."""
        if len(self._looks) < 2:  # noqa: PLR2004 - one and the one before
            return 0
        (earlier, before), (later, now) = self._looks[-2:]
        unseen = {name: len(blocks) - len(before.get(name, ())) for name, blocks in now.items() if any(one.place is None for one in blocks)}
        return (later - earlier) / max(unseen.values()) if unseen and max(unseen.values()) > 0 else 0

    def growing(self, loop: Loop) -> Iterator[tuple[Leak, str]]:
        """What grew from look to look of that loop, with the path of the first of it."""
        for name in {name for _, held in self._looks for name in held}:
            looks = [(step, held.get(name, [])) for step, held in self._looks]
            if is_local(self._paths[name]) and not looks[-1][1]:
                looks.pop()  # the function has returned
            while looks and not looks[0][1]:
                looks.pop(0)
            if len(looks) >= _FEWEST_LOOKS and _is_steady([(step, len(blocks)) for step, blocks in looks]):
                (first, few), (last, many) = looks[0], looks[-1]
                yield (
                    Leak(
                        bytes_per_iteration=round((_size(many) - _size(few)) / max(1, len(loop.between(first, last)))),
                        iterations_count=loop.count,
                        place=place_of(many),
                        keeps_graph=any(category(block) == ACTIVATION for block in many),
                        loop=loop,
                        blocks=tuple(sorted(many, key=lambda block: block.born)),
                    ),
                    self._paths[name],
                )


def _order(path: str, name: str) -> tuple[int, str, bool]:
    """The first place in a collection first, and there the way through a graph."""
    place, _, _ = path.partition(name)[2].partition("]")
    return len(place), place, "grad_fn" not in path


def place_of(blocks: Iterable[Block]) -> Place | None:
    """The line that made most of what was seen to be made, in a graph where there is any of it."""
    sizes: Counter[tuple[bool, Place]] = Counter()
    for block in blocks:
        if block.place is not None:
            sizes[category(block) == ACTIVATION, block.place] += block.bytes
    return max(sizes, key=lambda one: (one[0], sizes[one]), default=(False, None))[1]


def _is_steady(looks: list[tuple[int, int]]) -> bool:
    """Whether there was ever more, and after each look at least half as much a step as before it; a step's is left to chance.

    What the last step left may be known by another name, as a loop's own variable; several things may come at once.
    """
    last, many = looks[-1]
    at_once = min((more - less for (_, less), (_, more) in pairwise(looks) if more > less), default=1)
    goes_on = all(2 * (many - found + max(at_once, many / last)) * step >= found * (last - step) for step, found in looks[:-1])
    return many >= _FEWEST and goes_on and all(less <= more for (_, less), (_, more) in pairwise(looks))


def _size(blocks: Iterable[Block]) -> int:
    return sum(block.bytes for block in blocks)
