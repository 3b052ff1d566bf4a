"""What is kept on purpose: models and their parts that are trained one after another, and the results of a loop."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.memtrace.held.fixes import collection, is_part
from torchdebug_magics.instruments.memtrace.ledger.memory_census import GRADIENT, OPTIMIZER_STATE, PARAMETER

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.growth.line_growth import Leak
    from torchdebug_magics.instruments.memtrace.growth.loop_steps import Steps
    from torchdebug_magics.instruments.memtrace.held.keepers import Keepers
    from torchdebug_magics.instruments.memtrace.ledger.allocation_lines import Place
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Block

__all__ = ["collected_in", "is_collected", "unintended"]

_STEPS_A_STAGE = 2
"""From so many on, a part that a model gets, or a model, belongs to a stage, and not to an iteration."""
_BOUNDED = ("['old_dirs']", "['old_stps']", "['ro']")
"""The history of L-BFGS, which has a limit."""
_IN_A_VARIABLE = re.compile(r"(?:\w+\(\) local ')?\w+'?(?:\[[^\]]*\]|\{\.\.\.\})+(?:\.base)*$")
"""Such as ``outs[0]``, and not an attribute, what a function closes over, or a graph."""


def unintended(
    named: Sequence[tuple[Leak, str]], keepers: Keepers, steps: Steps, *, graph: str, plain: Collection[Place]
) -> list[tuple[Leak, str]]:
    """Of leaks with their paths those that nobody wants.

    `graph` is the variable with a graph that grows; `plain` are the lines whose tensors had none when it was looked who holds them.
    """
    named = [one for one in named if not any(word in one[1] for word in _BOUNDED)]
    meant = [leak for leak, path in named if leak.role == PARAMETER and _is_of_a_stage(leak, path)]
    also = {OPTIMIZER_STATE, GRADIENT} if meant else set()
    named = [(leak, path) for leak, path in named if leak not in meant and leak.role not in also]
    with_graph = {collection(path) for _, path in named if "grad_fn" in path or (graph and path.startswith(graph))}
    return [one for one in named if collection(one[1]) in with_graph or not _is_result(*one, keepers, steps, plain)]


def _is_of_a_stage(leak: Leak, path: str) -> bool:
    """Whether it is a part that a model gets at times, or models of which each is trained for itself."""
    made = {block.iteration for block in leak.blocks}
    in_stages = max(made) - min(made) >= _STEPS_A_STAGE * (len(made) - 1)
    return in_stages and (is_part(path) or all(block.is_called for block in leak.blocks if not block.died))


def _is_result(leak: Leak, path: str, keepers: Keepers, steps: Steps, plain: Collection[Place]) -> bool:
    """Whether it is what a loop was for: nothing is trained in it, no graph is kept, and its own code keeps it, or has returned by now."""
    if steps.is_training(leak.loop, leaves=True):
        return False
    if all(block.died for block in leak.blocks):
        return not leak.keeps_graph or leak.place in plain
    return _is_fed_back(leak, path, keepers) if leak.swells else is_collected(path, leak.blocks, keepers)


def _is_fed_back(leak: Leak, path: str, keepers: Keepers) -> bool:
    """Whether the model itself adds to it, and is given it again: the keys and values of the text so far."""
    in_forward = all(block.span.phase == "forward" for block in leak.blocks)
    return in_forward and _IN_A_VARIABLE.match(path) is not None and not keepers.has_error and not keepers.have_history(leak.blocks)


def collected_in(named: Iterable[tuple[Leak, str]], told: Iterable[tuple[Leak, str]]) -> str:
    """The variable that holds the results of a loop: of what grows, and is not told as a leak."""
    leaks = [path for _, path in told]
    return next((collection(path) for _, path in named if path not in leaks and _IN_A_VARIABLE.match(path) is not None), "")


def is_collected(path: str, blocks: Iterable[Block], keepers: Keepers) -> bool:
    """Whether a variable simply holds whole tensors, without a graph: what it was made for, unless the cell has died of it."""
    if keepers.has_error or "cache" in path.lower() or _IN_A_VARIABLE.match(path) is None:
        return False
    blocks = list(blocks)
    of_loop = all(
        block.is_returned or block.place is None or block.span.phase != "forward" for block in blocks
    )  # else a hook puts it there
    return of_loop and not (keepers.are_slices(blocks) or keepers.have_history(blocks))
