"""What goes on growing: blocks that a line makes again and again, and that nothing lets go; and tensors that swell."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.memtrace.growth.growth_filters import goes_on, is_complete, is_over, is_used_up, is_window, was_let_go
from torchdebug_magics.instruments.memtrace.ledger.memory_census import ACTIVATION
from torchdebug_magics.instruments.memtrace.ledger.sites import category

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.growth.loop_steps import Loop, Steps
    from torchdebug_magics.instruments.memtrace.ledger.allocation_lines import Place
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Block

__all__ = ["LEAST_BYTES", "Leak", "leaking", "repeated"]

LEAST_BYTES = 64
"""An iteration: a scalar that is kept is what one wants."""
_FEWEST = 3
"""Iterations from which one may speak of growth."""
_MOST_PART = 0.6
_AT_ONCE = 2
"""Steps: a variable that is bound anew keeps its value into the next one."""


@dataclass(frozen=True)
class Leak:
    """What one line keeps, before it is known who holds it."""

    bytes_per_iteration: int
    iterations_count: int
    place: Place | None
    """None where nobody saw it made."""
    keeps_graph: bool
    swells: bool = False
    """Whether it is one tensor that gets larger, and not more and more of them."""
    loop: Loop | None = field(default=None, repr=False)
    blocks: tuple[Block, ...] = field(default=(), repr=False)
    """The earliest first."""

    @property
    def dim(self) -> int | None:
        """Along which a tensor swells."""
        return next((block.chain.dim for block in self.blocks if block.chain is not None), None)

    @property
    def role(self) -> str:
        """What most of it is to a model; empty where that is nothing."""
        sizes: Counter[str] = Counter()
        for block in self.blocks:
            sizes[block.role] += block.bytes
        return max(sizes, key=lambda role: sizes[role], default="")


def leaking(blocks: Iterable[Block], steps: Steps, *, is_over: bool = False) -> list[Leak]:
    """What lines keep of each iteration, and tensors that swell; the most bytes first. `blocks` may be gone by now.

    A line's first iteration does not count, as in it gradients and states are made, and not its last one, whose results still have their
    names. `is_over`: `blocks` hold all that is there, also what was made in steps that were only counted.
    """
    by_source: dict[tuple[Place, Hashable], list[Block]] = defaultdict(list)
    chains: dict[int, Block] = {}
    unseen_bytes = 0
    for block in blocks:
        if block.is_old:
            continue
        if block.place is None:
            unseen_bytes += 0 if block.died else block.bytes
        elif block.chain is None:
            by_source[block.place, block.source].append(block)
        elif id(block.chain) not in chains or chains[id(block.chain)].born < block.born:
            chains[id(block.chain)] = block
    found = [leak for (place, source), made in by_source.items() if (leak := _kept(place, source, made, steps)) is not None]
    if is_over:
        found = [leak for leak in found if is_complete(leak, unseen_bytes)]
    swollen = [leak for block in chains.values() if (leak := _swelling(block, steps)) is not None]
    found += [leak for leak in swollen if not was_let_go(leak, chains.values())]
    return sorted(found, key=lambda leak: -leak.bytes_per_iteration)


def _kept(place: Place, source: Hashable, made: list[Block], steps: Steps) -> Leak | None:
    ran = sorted(place.steps[source])
    if len(ran) < _FEWEST:
        return None
    end = steps.clock_of(ran[0], ran[-1])
    alive = [block for block in made if block.iteration and _is_there(block, end)]
    kept = {block.iteration for block in alive}
    inner = _inner(ran, kept) or _at_times(ran, kept, made, steps)
    if not inner or is_used_up(alive) or is_window([number for number in inner if number in kept], made, steps, end):
        return None
    first, last = inner[0], inner[-1]
    whole = any(not block.span.is_between for block in alive)
    loop = steps.of(inner) if whole else steps.around(first, last, len(inner) - 1)
    if loop is not None and is_over(loop, steps):
        return None
    if loop is not None and not goes_on(kept, _looked_at(loop, min(kept), steps, whole=whole)):
        return None
    keeps_graph = any(category(block) == ACTIVATION for block in alive)
    if loop is not None and keeps_graph and steps.accumulates(loop):
        return None
    times = sum(1 for _ in steps.seen(loop, first, last, whole=whole)) if loop is not None else 0
    counted = set(inner[:-1])
    size_bytes = sum(block.bytes for block in alive if block.iteration in counted)
    return Leak(
        bytes_per_iteration=round(size_bytes / max(1, times)),
        iterations_count=0 if loop is None else len(loop.between(min(block.iteration for block in alive), loop.numbers[-1] + 1)),
        place=place,
        keeps_graph=keeps_graph,
        loop=loop,
        blocks=(*(block for block in made if not block.iteration), *sorted(alive, key=lambda block: block.born)),
    )


def _looked_at(loop: Loop, first: int, steps: Steps, *, whole: bool) -> Sequence[int]:
    """The steps from `first` to the loop's end in which it would have been seen: between the calls, all of any loop."""
    end = loop.numbers[-1] + 1
    return list(steps.seen(loop, first, end, whole=True)) if whole else range(first, end)


def _inner(ran: list[int], kept: set[int]) -> list[int]:
    """The iterations that count, in order, if what they made was kept; empty if it was not."""
    inner = ran[1:-1]
    if len(kept) >= _FEWEST and kept.issuperset(ran):
        return ran
    late = [number for number in inner if number >= min(kept, default=0)]  # from where it began
    if len(late) >= _FEWEST and kept.issuperset(late):
        return late
    return inner if len(kept.intersection(inner)) >= max(_FEWEST - 1, _MOST_PART * len(inner)) else []


def _at_times(ran: list[int], kept: set[int], made: list[Block], steps: Steps) -> list[int]:
    """The iterations that count where only some keep what the line makes, such as every tenth; empty if that may be chance.

    It is none where they lie evenly, from the first on, and whatever else was made there was let go at once.
    """
    if not _lie_evenly([at for at, number in enumerate(ran) if number in kept], len(ran)):
        return []
    was_let_go = all(steps.at(block.died) - block.iteration <= _AT_ONCE for block in made if block.died)
    return ran[1:-1] if was_let_go else []


def _swelling(block: Block, steps: Steps) -> Leak | None:
    """A tensor that was joined with something again and again, as ``hist = torch.cat([hist, x])`` does."""
    chain = block.chain
    if chain is None or block.place is None or len(chain.iterations) < _FEWEST:
        return None
    first, last = chain.iterations[0], block.iteration
    loop = steps.around(first, last, len(chain.iterations) - 1)
    lasts = loop is not None and len(loop.between(last + 1, loop.numbers[-1] + 1)) <= 1
    if loop is None or not lasts or not _is_there(block, steps.clock_of(first, last)):
        return None
    return Leak(
        bytes_per_iteration=round((block.bytes - chain.first_bytes) / max(1, len(loop.between(first + 1, last + 1)))),
        iterations_count=len(loop.between(first, loop.numbers[-1] + 1)),
        place=block.place,
        keeps_graph=False,
        swells=True,
        loop=loop,
        blocks=(block,),
    )


def _is_there(block: Block, clock: int) -> bool:
    return not block.died or block.died > clock


def repeated(blocks: Iterable[Block]) -> Iterator[Leak]:
    """What lines keep where no model is called: then how often the line itself ran is what is counted."""
    by_line: dict[Place, list[Block]] = defaultdict(list)
    for block in blocks:
        if not block.is_old and block.place is not None:
            by_line[block.place].append(block)
    for place, found in by_line.items():
        times = _times(found)
        if times >= _FEWEST and (len(found) >= _MOST_PART * place.count or _is_steady(found, place.count)):
            yield Leak(
                bytes_per_iteration=sum(block.bytes for block in found) // times,
                iterations_count=times,
                place=place,
                keeps_graph=any(category(block) == ACTIVATION for block in found),
                blocks=tuple(sorted(found, key=lambda block: block.born)),
            )


def _is_steady(blocks: Collection[Block], count: int) -> bool:
    """Whether the largest are kept of all that the line made, from the first to the last, among others that go: one each time it ran."""
    largest = max(block.bytes for block in blocks)
    return _lie_evenly(sorted(block.nth - 1 for block in blocks if block.bytes == largest), count)


def _lie_evenly(places: Sequence[int], count: int) -> bool:
    """Whether they are as far apart from each other as from both ends of all the `count` places."""
    if len(places) <= _FEWEST:
        return False
    apart = [later - earlier for earlier, later in pairwise(places)]
    most = max(apart)
    return most <= 2 * median(apart) and places[0] <= most and count - places[-1] <= most + 1


def _times(blocks: Collection[Block]) -> int:
    """How often the largest was made."""
    return Counter(block.bytes for block in blocks)[max(block.bytes for block in blocks)]
