"""Why the forward broke, in one sentence, with how the mismatching tensor came about."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.shapes.leaves import sizes
from torchdebug_magics.instruments.shapes.report import Failure, Step
from torchdebug_magics.probing.where import is_user_code, location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.examine import Seen
    from torchdebug_magics.instruments.shapes.ops import Failed
    from torchdebug_magics.report import Location

__all__ = ["explained", "place", "sentence"]


def explained(seen: Seen) -> Failure:
    """The failure of a run."""
    run, error = seen.run, seen.error
    assert error is not None and run.error is not None  # noqa: PT018
    failed = run.failed if run.failed is not None and run.failed.error is run.error else None
    calls = [one for one in run.calls.made if one.outputs is None]
    return Failure(
        module=failed.module if failed is not None else calls[-1].path if calls else None,
        op=failed.op if failed is not None else None,
        location=place(run.error),
        operand_shapes=tuple(sizes(one) for _, one in failed.operands) if failed else calls[-1].inputs if calls else (),
        explanation=sentence(failed, error),
        error=f"{type(error).__name__}: {error}",
        chain=chain(failed),
    )


def place(error: BaseException) -> Location | None:
    """The user's own line, the innermost one."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_user_code(frame.f_code):
            found = location(frame.f_code.co_filename, line, frame.f_code.co_name)
    return found


def chain(failed: Failed | None) -> tuple[Step, ...]:
    """The ops that the first operand with a history came through, from the input on."""
    made = next((one for one in failed.made if one is not None), None) if failed is not None else None
    steps: list[Step] = []
    while made is not None:
        steps.append(Step(op=made.op, module=made.module, input_shapes=tuple(shape for shape, _ in made.inputs), output_shape=made.shape))
        made = next((before for _, before in made.inputs if before is not None), None)
    return tuple(reversed(steps))


def sentence(failed: Failed | None, error: Exception) -> str:
    """What is said first."""
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if failed is None:
        return text
    return f"`{failed.module or failed.op}`: {text}"
