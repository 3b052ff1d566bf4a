"""A failed assertion of a GPU kernel: raised by whatever line came next, and after it nothing on the GPU can be read."""

from __future__ import annotations

from torchdebug_magics.instruments.shapes.explain import refusal
from torchdebug_magics.instruments.shapes.report import Failure, Fix

_SENTENCE = "In this line or one before it, the GPU met an index or a class out of range; it answers nothing more in this process"
_ON_CPU = "restart the kernel and run the cell with the model and its data on the CPU: `%torchdebug` then names the tensor and its values"


def gpu_assertion(error: BaseException) -> Failure | None:
    """What is certain; None for any other error."""
    if "device-side assert" not in str(error):
        return None
    return refusal(error, _SENTENCE, fixes=[Fix(code=_ON_CPU, verified=False)])
