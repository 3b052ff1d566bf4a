"""A dispatch mode that shows every op to a listener and changes none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchdebug_magics.probing.compiling import not_compiled
from torchdebug_magics.probing.shards import is_shard_type

__all__ = ["OpListener", "ResultListener", "Run"]

Run = Callable[[], Any]


class OpListener(TorchDispatchMode):
    """Calls ``listener(func, args, kwargs, run)`` for each op; the listener calls `run` once and returns what it gave.

    Fake tensors and tensor subclasses are passed through untouched.
    """

    def __init__(self, listener: Callable[[Any, tuple[Any, ...], dict[str, Any], Run], Any], owner: object = None) -> None:
        super().__init__()
        self._torchdebug_owner = owner  # whose sweep takes the mode off, should an interrupt leave it
        self._listener = listener

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by the compiler."""
        # False: what is compiled runs eagerly under this mode, op by op, which is what a replay is for.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        keywords = kwargs or {}

        def run() -> Any:
            written = _lists_written(func, args, keywords)
            versions = [tensor._version for tensor in written]
            result = func(*args, **keywords)
            # Where an op is run list-wise, each tensor's version is moved by the op's own parts, and those do not move it in here.
            increment_version([tensor for tensor, version in zip(written, versions, strict=True) if tensor._version == version])
            return result

        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, keywords)) if isinstance(leaf, torch.Tensor)):
            return run()
        return self._listener(func, args, keywords, run)


class ResultListener(TorchDispatchMode):
    """Calls ``listener(func, args, result)`` after each op, ``failed(func, error)`` where one raises; as cheap as a mode can be.

    Where there is one, ``before(func, args, kwargs)`` is called before each op. `takes_apart`: of an op on a DTensor, what it computes and
    communicates in this process is shown in its place.
    """

    def __init__(
        self,
        listener: Callable[[Any, tuple[Any, ...], Any], None],
        failed: Callable[[Any, BaseException], None],
        owner: object = None,
        *,
        before: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None,
        takes_apart: bool = False,
    ) -> None:
        super().__init__()
        self._torchdebug_owner = owner
        self._listener = listener
        self._failed = failed
        self._before = before
        self._takes_apart = takes_apart

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by the compiler: what first runs under this mode is compiled all the same."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Asked when the class is made. Torch's own way to keep the compiler out puts two frames around each op, and into each traceback.
        return False

    @not_compiled(nor_what_it_calls=True)
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        __tracebackhide__ = True
        if self._takes_apart and any(map(is_shard_type, types)):
            return NotImplemented  # it takes itself apart, and its parts come by again
        keywords = kwargs or {}
        if self._before is not None:
            self._before(func, args, keywords)
        written = _lists_written(func, args, keywords)
        versions = [tensor._version for tensor in written]
        try:
            result = func(*args, **keywords)
        except BaseException as error:
            self._failed(func, error)
            raise
        if written:
            increment_version([one for one, version in zip(written, versions, strict=True) if one._version == version])
        self._listener(func, args, result)
        return result


@functools.cache
def _writes_lists(func: Any) -> bool:
    """Whether an op writes tensors in place that it is given as a list, and moves their versions: the fused and scaling ones do not."""
    return str(func).startswith("aten._foreach_") and any(
        argument.alias_info is not None and argument.alias_info.is_write and str(argument.type).startswith("List[")
        for argument in func._schema.arguments
    )


def _lists_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an op writes in place and is given as a list, as the ``_foreach`` ops are."""
    if not _writes_lists(func):
        return []
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, (list, tuple)):
            found += [one for one in value if isinstance(one, torch.Tensor) and not one.is_inference()]
    return found
