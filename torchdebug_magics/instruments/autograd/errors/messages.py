"""Which kind of error a message of autograd's is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.report import Kind

__all__ = ["kind_of_error"]

_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"modified by an inplace operation", "inplace"),
    (r"backward through the graph a second time|saved (?:tensors|intermediate values).*already been freed", "second_backward"),
    (
        r"a view of a leaf Variable that requires grad|is a view and (?:is being|its base)|view was created in|is a view of a leaf",
        "view_inplace",
    ),
    (r"leaf [Vv]ariable.*(?:in-place|inplace)|leaf variable has been moved", "leaf_inplace"),
    (r"does not require grad and does not have a grad_fn|does not require grad$|doesn't require grad", "cut"),
    (r"grad can be implicitly created only for|grad_output\[\d+\] has a shape|Mismatch in shape: grad", "non_scalar"),
    (r"[Ii]nference tensors?\b", "inference_tensor"),
    (r"not have been used in the graph", "unused_input"),
    (r"[Oo]nly Tensors of floating point|only support calling .* floating|can only be created for (?:real|float)", "integer_grad"),
    (r"torch\.utils\.checkpoint|during the original forward and recomputation|[Rr]ecomputed values", "checkpoint_mismatch"),
    (
        r"derivative for .* is not implemented|differentiate twice|not implemented for .*double|does not support double backward",
        "no_double_backward",
    ),
    (
        r"returned an incorrect number of gradients|gradient different than None|save_for_backward can only|expected Variable or None",
        "custom_function",
    ),
    (r"returned an invalid gradient", "custom_function"),
)
_OTHERS = (
    r"assigned grad has data|attempting to assign a gradient|has changed the \w+ of value",
    r"optimizer got an empty parameter list",
    r"can't optimize a non-leaf|Can't call numpy\(\) on Tensor that requires grad|graph leaves|requires_grad flags of leaf",
    r"can't retain_grad|register a hook on a tensor",
)


def kind_of_error(error: BaseException) -> Kind | None:
    """None for an error that autograd did not raise."""
    message = str(error)
    if type(error).__name__ == "CheckpointError":
        return "checkpoint_mismatch"
    if not isinstance(error, (RuntimeError, ValueError, NotImplementedError)):
        return None
    kind = next((kind for pattern, kind in _KINDS if re.search(pattern, message)), None)
    if kind == "custom_function" and "invalid gradient" in message and not _is_of_user(message):
        return "other"
    return kind or ("other" if any(re.search(pattern, message) for pattern in _OTHERS) else None)


def _is_of_user(message: str) -> bool:
    """Whether the function that returned the gradient is not one of PyTorch's, whose names end in a number: ``MulBackward0``."""
    name = re.search(r"Function (\w+)", message)
    return name is not None and re.search(r"Backward\d+$", name[1]) is None
