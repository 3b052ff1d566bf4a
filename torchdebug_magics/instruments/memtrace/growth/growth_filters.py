"""What only seems to go on growing: a cache that is full by now, a list with a limit, a text that was written and let go."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.growth.line_growth import Leak
    from torchdebug_magics.instruments.memtrace.growth.loop_steps import Loop, Steps
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Block

__all__ = ["goes_on", "is_complete", "is_over", "is_used_up", "is_window", "was_let_go"]


def goes_on(kept: Collection[int], seen: Sequence[int]) -> bool:
    """Whether it kept on until the loop was over, and did not end when a cache was filled.

    The keys of a cache come in any order, so that it fills ever more slowly: it is asked whether the later half of the steps that were
    seen brought less than half as much as the earlier one.
    """
    if not seen:
        return True
    middle = seen[len(seen) // 2]
    early = sum(1 for number in kept if number < middle)
    return 2 * (len(kept) - early) >= early


def is_complete(leak: Leak, unseen_bytes: int) -> bool:
    """Whether as much is there as it would have kept by now, counting all that was made unseen: else it came to an end unseen."""
    wanted_bytes = leak.bytes_per_iteration * leak.iterations_count
    there_bytes = sum(block.bytes for block in leak.blocks)
    return any(block.died for block in leak.blocks) or 2 * (there_bytes + unseen_bytes) >= wanted_bytes


def is_used_up(kept: Collection[Block]) -> bool:
    """Whether one backward pass after the loop was what it was kept for: the losses of an episode, or of a sequence.

    What the last iteration made is not asked, as its own backward pass may come only now.
    """
    last = max(block.iteration for block in kept)
    earlier = [block for block in kept if block.iteration < last]
    return 2 * sum(block.bytes for block in earlier if block.used_up) > sum(block.bytes for block in earlier)


def is_over(loop: Loop, steps: Steps) -> bool:
    """Whether another loop, that went round with it, went on without it as long again: it has filled something, and is not needed now."""
    last = loop.numbers[-1]
    longer = (other for other in steps.loops.values() if len(other.between(last + 1, other.numbers[-1] + 1)) >= loop.count)
    return any(steps.goes_round_with(loop, other) for other in longer)


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
