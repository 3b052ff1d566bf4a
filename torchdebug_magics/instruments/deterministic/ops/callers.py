"""Who calls an op: the user's code, or something that the other run need not do."""

from __future__ import annotations

import sys
from itertools import takewhile
from types import FrameType

import torch
from torch.multiprocessing import reductions

from torchdebug_magics.probing import dispatch
from torchdebug_magics.probing.where import frames_above, owner

__all__ = ["is_passed_by"]

_BETWEEN = frozenset({dispatch.__file__, torch._ops.__file__, torch._tensor.__file__, torch.functional.__file__})
"""Files whose code does no more than to pass a call on."""
_CALL_THE_USERS = ("/twice/body.py", "/twice/function.py")
"""Our own that call what the user has given us."""
_COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/_aot_autograd/", "/torchinductor_")
_COMPILED = ("<eval_with_key>", *_COMPILERS)
_SHARDING = "/torch/distributed/tensor/_sharding_prop.py"
"""Where ops on DTensors are first tried on tensors without data; what came of it is then known, so that no later run does it again."""
_DISABLED = "DisableContext."
"""In the name of what torch puts around functions of its own that are not to be compiled, such as `zero_grad`, and around compiled ones."""


def is_passed_by(frame: FrameType | None) -> bool:
    """Whether the op that is called from `frame` is none of the cell's own."""
    return _is_ours(frame) or _is_compilers(frame) or _is_of_sharding(frame)


def _is_ours(frame: FrameType | None) -> bool:
    """Whether an op is called by this package itself, or by torch where a tensor comes from a worker: which worker is first, none can say.

    Who stands around a call of the user's, as around `backward()`, is no caller.
    """
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    if frame is None:
        return False
    name, above = frame.f_code.co_filename, frame.f_back
    if owner(name) == "own":
        return not name.replace("\\", "/").endswith(_CALL_THE_USERS)
    return name == torch._utils.__file__ and above is not None and above.f_code.co_filename == reductions.__file__


def _is_compilers(frame: FrameType | None) -> bool:
    """Whether an op is called by the compiler, or inside what it has compiled: that is one piece, and made in the first run alone."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return False
    inner = ""
    for one in frames_above(frame):
        file = one.f_code.co_filename
        if owner(file) != "torch":
            return False
        if any(part in file for part in _COMPILERS) and not (_is_disabled(one) and not any(part in inner for part in _COMPILED)):
            return True
        inner = file
    return False


def _is_of_sharding(frame: FrameType | None) -> bool:
    if "torch.distributed.tensor" not in sys.modules:
        return False
    files = (one.f_code.co_filename.replace("\\", "/") for one in frames_above(frame))
    return any(file.endswith(_SHARDING) for file in takewhile(lambda file: owner(file) == "torch", files))


def _is_disabled(frame: FrameType) -> bool:
    """Whether it only keeps the compiler away from what it calls."""
    caller = frame.f_back
    return _DISABLED in frame.f_code.co_qualname or (caller is not None and caller.f_code.co_filename == torch._compile.__file__)
