"""What goes on growing: blocks that a line makes again and again, and that nothing lets go; and tensors that swell."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from torchdebug_magics.instruments.memtrace.growth.graph_watch import LOOKS_AT
from torchdebug_magics.instruments.memtrace.growth.loop_steps import FEWEST, Loop, Series, Steps
from torchdebug_magics.instruments.memtrace.held.keepers import Keepers
from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Place, category, size_of
from torchdebug_magics.instruments.memtrace.trace import ACTIVATION, OPTIMIZER_STATE
from torchdebug_magics.memory.paths import NOWHERE, HolderPath

LEAST_BYTES = 64
"""An iteration: a scalar that is kept is what one wants."""
_MOST_PART, _NEARLY = 0.6, 0.9
_FEWEST_PARTS = 4
"""Things in a collection from which one may speak of growth that is not seen at each step."""


@dataclass(frozen=True)
class Leak:
    """What one line, or one collection, keeps more and more of."""

    bytes_per_iteration: int
    iterations_count: int
    place: Place | None
    """None where nobody saw it made."""
    blocks: tuple[Block, ...] = field(repr=False)
    """The earliest first."""
    loop: Loop | None = field(default=None, repr=False)
    swells: bool = False
    """Whether it is one tensor that gets larger, and not more and more of them."""
    path: HolderPath = NOWHERE
    """Of who holds it; empty before that is known, and where nobody with a name does."""

    @property
    def keeps_graph(self) -> bool:
        """Whether some of it was made for a graph."""
        return not self.swells and any(category(block) == ACTIVATION for block in self.blocks)

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
    kept = filter(None, (_kept(place, source, made, steps) for (place, source), made in by_source.items()))
    swollen = filter(None, (_swelling(block, steps) for block in chains.values()))
    found = [leak for leak in kept if not is_over or is_complete(leak, unseen_bytes)]
    found += [leak for leak in swollen if not was_let_go(leak, chains.values())]
    return sorted(found, key=lambda leak: -leak.bytes_per_iteration)


def _kept(place: Place, source: Hashable, made: list[Block], steps: Steps) -> Leak | None:
    ran = sorted(place.steps[source])
    if len(ran) < FEWEST:
        return None
    end = steps.clock_of(ran[0], ran[-1])
    alive = [block for block in made if block.iteration and _is_there(block, end)]
    kept = {block.iteration for block in alive}
    late = [number for number in ran[1:-1] if number >= min(kept, default=0)]  # from where it began
    # Of the last few alone, another round may let go as well.
    from_there = late if 2 * len(late) >= len(ran) else []
    whole_runs = (numbers for numbers in (ran, from_there) if len(numbers) >= FEWEST and kept.issuperset(numbers))
    inner = next(whole_runs, ran[1:-1])
    is_kept = len(kept.intersection(inner)) >= max(FEWEST - 1, _MOST_PART * len(inner))
    if not is_kept or is_used_up(alive) or is_window([number for number in inner if number in kept], made, steps, end):
        return None
    first, last = inner[0], inner[-1]
    whole = any(not block.span.is_between for block in alive)
    loop = steps.of(inner) if whole else steps.around(first, last, len(inner) - 1)
    times = 0
    if loop is not None:
        since, until = min(kept), loop.numbers[-1] + 1
        # Between the calls, it would have been seen in all steps of any loop.
        seen = [number for number in loop.between(since, until) if number in steps.followed] if whole else range(since, until)
        # The keys of a cache come in any order, so that it fills ever more slowly: the later half brings less than half as much.
        early = sum(number < seen[len(seen) // 2] for number in kept) if seen else 0
        if is_over(loop, steps) or 2 * (len(kept) - early) < early:
            return None
        times = sum(not whole or number in steps.followed for number in loop.between(first, last))
    counted = set(inner[:-1])
    return Leak(
        bytes_per_iteration=round(size_of(block for block in alive if block.iteration in counted) / max(1, times)),
        iterations_count=0 if loop is None else len(loop.between(min(kept), loop.numbers[-1] + 1)),
        place=place,
        loop=loop,
        blocks=(*(block for block in made if not block.iteration), *sorted(alive, key=lambda block: block.born)),
    )


def _swelling(block: Block, steps: Steps) -> Leak | None:
    """A tensor that was joined with something again and again, as ``hist = torch.cat([hist, x])`` does."""
    chain = block.chain
    if chain is None or chain.count < FEWEST:
        return None
    first, last = chain.first, block.iteration
    loop = steps.around(first, last, chain.count - 1)
    lasts = loop is not None and len(loop.between(last + 1, loop.numbers[-1] + 1)) <= 1
    if loop is None or not lasts or not _is_there(block, steps.clock_of(first, last)):
        return None
    return Leak(
        bytes_per_iteration=round((block.bytes - chain.first_bytes) / max(1, len(loop.between(first + 1, last + 1)))),
        iterations_count=len(loop.between(first, loop.numbers[-1] + 1)),
        place=block.place,
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
        # How often the largest was made; and whether it was kept from the first to the last time that the line ran.
        largest = [block for block in found if block.bytes == max(block.bytes for block in found)]
        is_steady = _lie_evenly(sorted(block.nth - 1 for block in largest), place.count)
        if (times := len(largest)) >= FEWEST and (len(found) >= _MOST_PART * place.count or is_steady):
            yield Leak(
                bytes_per_iteration=size_of(found) // times,
                iterations_count=times,
                place=place,
                blocks=tuple(sorted(found, key=lambda block: block.born)),
            )


def _lie_evenly(places: Sequence[int], count: int) -> bool:
    """Whether they are as far apart from each other as from both ends of all the `count` places."""
    if len(places) <= FEWEST:
        return False
    apart = [later - earlier for earlier, later in pairwise(places)]
    most = max(apart)
    return most <= 2 * median(apart) and places[0] <= most and count - places[-1] <= most + 1


def is_complete(leak: Leak, unseen_bytes: int) -> bool:
    """Whether as much is there as it would have kept by now, counting all that was made unseen: else it came to an end unseen."""
    wanted_bytes = leak.bytes_per_iteration * leak.iterations_count
    return any(block.died for block in leak.blocks) or 2 * (size_of(leak.blocks) + unseen_bytes) >= wanted_bytes


def is_used_up(kept: Collection[Block]) -> bool:
    """Whether one backward pass after the loop was what it was kept for: the losses of an episode, or of a sequence.

    What the last iteration made is not asked, as its own backward pass may come only now.
    """
    last = max(block.iteration for block in kept)
    earlier = [block for block in kept if block.iteration < last]
    return 2 * size_of(block for block in earlier if block.used_up) > size_of(earlier)


def is_over(loop: Loop, steps: Steps) -> bool:
    """Whether another loop, that went round with it, went on without it as long again: it has filled something, and is not needed now."""
    last = loop.numbers[-1]
    longer = (other for other in steps.loops.values() if len(other.between(last + 1, other.numbers[-1] + 1)) >= loop.count)
    rounds = list(pairwise(loop.numbers))
    return any(sum(1 for begin, end in rounds if len(other.between(begin, end))) >= _NEARLY * len(rounds) for other in longer)


def is_window(kept: list[int], made: list[Block], steps: Steps, end: int) -> bool:
    """Whether what was made before was kept as long, and then let go, as in a list with a limit, or one that is emptied at times."""
    span = kept[-1] - kept[0]
    return any(block.iteration and 0 < block.died <= end and steps.at(block.died) - block.iteration >= span for block in made)


def was_let_go(leak: Leak, latest: Iterable[Block]) -> bool:
    """Whether another tensor at the same line swelled as far, and then went: one for each text that is written, or each episode."""
    (whole,) = leak.blocks
    return any(
        other is not whole and other.died and other.place is whole.place and other.source == whole.source and 2 * other.bytes >= whole.bytes
        for other in latest
    )


class Tally:
    """Of the collections that hold what was made in the cell."""

    def __init__(self) -> None:
        self._looks: list[tuple[int, Mapping[str, list[Block]]]] = []
        self._paths: dict[str, HolderPath] = {}
        """To the first thing in each."""

    def weigh(self, step: int, blocks: Iterable[Block], keepers: Keepers) -> None:
        """At the beginning of that step, or after the last one."""
        held: dict[str, list[Block]] = defaultdict(list)
        for block in blocks:
            holding = keepers.of(block)
            path, name = holding.path, holding.path.collection
            is_plain = block.role in {"", ACTIVATION} or (block.role == OPTIMIZER_STATE and not path.is_made_once)
            if path.inside and is_plain and not holding.is_bounded:
                held[name].append(block)
                # The first place in a collection first, and there the way through a graph.
                paths = (path, self._paths.get(name, path))
                self._paths[name] = min(paths, key=lambda path: (len(path.place), path.place, not path.through_graph))
        self._looks.append((step, held))

    def steps_each(self) -> float:
        """In how many steps a collection got one thing more since the last look, of which nobody saw the making; 0 where none did."""
        if len(self._looks) < 2:  # noqa: PLR2004 - one and the one before
            return 0
        (earlier, before), (later, now) = self._looks[-2:]
        unseen = {
            name: len(blocks) - len(before.get(name, ())) for name, blocks in now.items() if any(block.place is None for block in blocks)
        }
        return (later - earlier) / max(unseen.values()) if unseen and max(unseen.values()) > 0 else 0

    def growing(self, loop: Loop) -> Iterator[Leak]:
        """What grew from look to look of that loop, each with the path of the first of it."""
        for name in {name for _, held in self._looks for name in held}:
            looks = [(step, held.get(name, [])) for step, held in self._looks]
            if self._paths[name].function and not looks[-1][1]:
                end, _ = looks.pop()  # the function has returned
                if looks[-1][0] < max(step for step in LOOKS_AT if step < end):
                    continue  # for long before that, nothing had grown
            while looks and not looks[0][1]:
                looks.pop(0)
            if len(looks) >= FEWEST and _is_filled(looks):
                (first, few), (last, many) = looks[0], looks[-1]
                yield Leak(
                    bytes_per_iteration=round((size_of(many) - size_of(few)) / max(1, len(loop.between(first, last)))),
                    iterations_count=loop.count,
                    place=place_of(many),
                    loop=loop,
                    blocks=tuple(sorted(many, key=lambda block: block.born)),
                    path=self._paths[name],
                )


def place_of(blocks: Iterable[Block]) -> Place | None:
    """The line that made most of what was seen to be made, in a graph where there is any of it."""
    sizes: Counter[tuple[bool, Place]] = Counter()
    for block in blocks:
        if block.place is not None:
            sizes[category(block) == ACTIVATION, block.place] += block.bytes
    return max(sizes, key=lambda size: (size[0], sizes[size]), default=(False, None))[1]


def _is_filled(looks: Sequence[tuple[int, Sequence[Block]]]) -> bool:
    """Whether a collection gets ever more; a step's is left to chance.

    What the last step left may be known by another name, as a loop's own variable; several things may come at once.
    """
    counts = [(step, len(blocks)) for step, blocks in looks]
    last, many = counts[-1]
    at_once = min((more - less for (_, less), (_, more) in pairwise(counts) if more > less), default=1)
    return many >= _FEWEST_PARTS and Series([(0, 0), *counts]).is_steady(slack=max(at_once, many / last))
