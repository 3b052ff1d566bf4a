"""Why memory was refused, and what would help: each with the bytes that it would save here."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from torchdebug_magics.format import byte_size
from torchdebug_magics.instruments.memtrace.findings import Advice, Oom
from torchdebug_magics.instruments.memtrace.ledger.memory_census import ACTIVATION, OPTIMIZER_STATE, TEMPORARY
from torchdebug_magics.instruments.memtrace.ledger.refused_memory import refused_bytes
from torchdebug_magics.instruments.memtrace.ledger.sites import by_category, by_module, category
from torchdebug_magics.probing.where import locate, user_frame

if TYPE_CHECKING:
    from types import FrameType

    from torchdebug_magics.instruments.memtrace.findings import Growth, Undeleted
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Block
    from torchdebug_magics.instruments.memtrace.ledger.refused_memory import OutOfMemory
    from torchdebug_magics.report import Location

__all__ = ["explained", "refused_by"]

_NUMBERED = re.compile(r"^(.*?)\.?(\d+)(?:\.|$)")
_WORTH = 0.01
"""Of what is alive: less is not worth the change."""
_MANY_UNUSED = 0.2


def refused_by(error: BaseException | None) -> BaseException | None:
    """The error by which memory was refused, of those that led to this one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (RuntimeError, MemoryError)) and refused_bytes(error) is not None:
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def explained(
    error: BaseException,
    seen: OutOfMemory | None,
    left: Collection[Block],
    growth: Growth | None,
    handled: Undeleted | None,
    *,
    iteration: int,
    unused_bytes: int,
) -> Oom:
    """Why, and what would help.

    `seen` is what was noted when the op raised, where it was followed; `left` is what was alive at the end, `handled` what an error
    holds that was being handled, `unused_bytes` what the caching allocator had reserved and not given out.
    """
    is_seen = seen is not None and seen.error_id == id(error)
    alive = seen.alive if seen is not None and is_seen else left
    sizes = by_category(alive)
    live_bytes = sum(sizes.values())
    asked_bytes = refused_bytes(error) or 0
    return Oom(
        asked_bytes=asked_bytes,
        op=seen.op.removesuffix(".default") if seen is not None and is_seen else "",
        module=seen.module if seen is not None and is_seen else "",
        location=seen.place.location if seen is not None and is_seen and seen.place is not None else _location(error),
        phase=seen.span.phase if seen is not None and is_seen else "other",
        iteration=iteration,
        kind="handled error" if handled is not None else _kind(growth, live_bytes, asked_bytes, unused_bytes),
        live_bytes=live_bytes,
        by_category=sizes,
        by_module=by_module(alive),
        unused_reserved_bytes=unused_bytes,
        advice=(*_advice(alive, sizes, growth, unused_bytes, live_bytes), *_retried(handled)),
    )


def _kind(growth: Growth | None, live_bytes: int, asked_bytes: int, unused_bytes: int) -> Literal["sizing", "leak", "fragmentation"]:
    if unused_bytes > max(asked_bytes, int(_MANY_UNUSED * live_bytes)):
        return "fragmentation"
    return "sizing" if growth is None else "leak"


def _location(error: BaseException) -> Location | None:
    innermost: FrameType | None = None
    trace = error.__traceback__
    while trace is not None:
        innermost, _line = trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    frame = user_frame(innermost)
    return None if frame is None else locate(frame)


def _advice(
    alive: Collection[Block], sizes: Mapping[str, int], growth: Growth | None, unused_bytes: int, live_bytes: int
) -> Iterator[Advice]:
    """What is easy and changes nothing first."""
    for one in (*_of_step(alive, sizes), *_of_optimizer(sizes), *_in_half(sizes), *_defragmented(unused_bytes), *_freed(growth)):
        if one.saved_bytes > _WORTH * live_bytes:
            yield one


def _retried(handled: Undeleted | None) -> Iterator[Advice]:
    if handled is not None:
        yield Advice(what="retrying after the `except` block, not in it", saved_bytes=handled.live_bytes, how=handled.fix)


def _freed(growth: Growth | None) -> Iterator[Advice]:
    if growth is not None:
        held_bytes = growth.bytes_per_iteration * growth.iterations_count
        holder = f" `{growth.holder}`" if growth.holder else " the variable that keeps it"
        yield Advice(what=f"freeing the memory that grows, kept by{holder}", saved_bytes=held_bytes, how=growth.fix)


def _of_step(alive: Collection[Block], sizes: Mapping[str, int]) -> Iterator[Advice]:
    step_bytes = sizes.get(ACTIVATION, 0) + sizes.get(TEMPORARY, 0)
    if not step_bytes:
        return
    yield Advice(
        what="half the batch, with gradients accumulated over two",
        saved_bytes=step_bytes // 2,
        how="call `backward()` on `loss / 2` for each half, and `optimizer.step()` after both: the same gradients",
    )
    parent, saved_bytes, blocks_count = _checkpointed(alive)
    if saved_bytes:
        yield Advice(
            what=f"checkpointing each of the {blocks_count} blocks of `{parent}`"
            if parent
            else f"checkpointing each of the {blocks_count} blocks",
            saved_bytes=saved_bytes,
            how="`torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)` in place of `block(x)`: about a third slower",
        )


def _checkpointed(alive: Collection[Block]) -> tuple[str, int, int]:
    """(where the blocks are, bytes, how many): one block's activations are made again at a time, the others' are not kept."""
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for block in alive:
        found = _NUMBERED.match(block.module)
        if found is not None and category(block) == ACTIVATION:
            sizes[found[1]][found[2]] += block.bytes
    savings = [(sum(each.values()) - max(each.values()), parent, len(each)) for parent, each in sizes.items() if len(each) > 1]
    saved_bytes, parent, count = max(savings, default=(0, "", 0))
    return parent, saved_bytes, count


def _of_optimizer(sizes: Mapping[str, int]) -> Iterator[Advice]:
    state_bytes = sizes.get(OPTIMIZER_STATE, 0)
    if state_bytes:
        yield Advice(
            what="an 8-bit optimizer", saved_bytes=state_bytes * 3 // 4, how="such as `bitsandbytes.optim.AdamW8bit`", changes_training=True
        )
        how = "`torch.optim.SGD` without momentum: training changes"
        yield Advice(what="an optimizer without state", saved_bytes=state_bytes, how=how, changes_training=True)


def _in_half(sizes: Mapping[str, int]) -> Iterator[Advice]:
    yield Advice(
        what="bfloat16 in the forward pass",
        saved_bytes=sizes.get(ACTIVATION, 0) // 2,
        how="`with torch.autocast(device_type, dtype=torch.bfloat16):` around the forward pass and the loss, if they run in float32 now",
        changes_training=True,
    )


def _defragmented(unused_bytes: int) -> Iterator[Advice]:
    if unused_bytes:
        yield Advice(
            what="less fragmentation",
            saved_bytes=unused_bytes,
            how=f"`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before the process starts: {byte_size(unused_bytes)} are reserved in "
            "blocks too small to use. `empty_cache()` releases only whole segments, and the next step reserves them again",
        )
