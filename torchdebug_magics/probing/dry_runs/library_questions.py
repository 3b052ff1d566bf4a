"""What libraries ask about a tensor before they look at its values."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution

if TYPE_CHECKING:
    from torchdebug_magics.probing.dry_runs.faking import Fakes

__all__ = ["answers"]


@contextmanager
def answers(fakes: Fakes) -> Iterator[None]:
    """Inside, what libraries ask is answered as for real tensors, so that they take the same way.

    Transformers keeps a mask of ones where a tensor is fake: ours with known values are looked at like real ones. Distributions look
    at the values of their parameters, which nobody knows.
    """
    with ExitStack() as stack:
        library: Any = sys.modules.get("transformers.utils.import_utils")
        if (asked := getattr(library, "is_fake_tensor", None)) is not None:
            stack.callback(setattr, library, "is_fake_tensor", asked)
            library.is_fake_tensor = lambda tensor: isinstance(tensor, FakeTensor) and fakes.value(tensor) is None
        stack.callback(Distribution.set_default_validate_args, Distribution._validate_args)
        Distribution.set_default_validate_args(False)
        yield
