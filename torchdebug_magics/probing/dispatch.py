"""A dispatch mode that shows every op to a listener and changes none, and when to stand aside for torch's compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import overrides
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from torchdebug_magics.probing.safety import Guard, interrupts_held
from torchdebug_magics.probing.storages import is_shard_type

Run = Callable[[], Any]
modes: Callable[[], list[TorchDispatchMode]] = _get_current_dispatch_mode_stack
"""The modes that stand, the lowest first."""
_CALLED = "__compiled_fn_"
"""How the compiler names what such code calls."""
C = TypeVar("C", bound="Callable[..., Any]")
_TRACING = tuple(getattr(torch._C._TorchDispatchModeKey, key) for key in ("PROXY", "FAKE", "FUNCTIONAL"))


def not_compiled(*, nor_what_it_calls: bool) -> Callable[[C], C]:
    """A compiled function that runs a part of itself as plain Python has each function called from there compiled, ours too."""
    inside = _FrameAction.SKIP if nor_what_it_calls else _FrameAction.DEFAULT

    def mark(call: C) -> C:
        set_code_exec_strategy(call.__code__, _FrameExecStrategy(_FrameAction.SKIP, inside))
        return call

    return mark


def is_rewritten(code: CodeType) -> bool:
    """Whether torch's compiler put it in the place of a function of the user's: its lines are all the first one."""
    return any(name.startswith(_CALLED) for name in code.co_names)


def is_being_compiled() -> bool:
    """Whether torch's compiler works here now: what runs then is no step of the user's, but a trial by the compiler."""
    return TracingContext.try_get() is not None


def is_being_traced() -> bool:
    """Whether ops are written down, or only tried out, here and now: what we compute would stand in the user's trace."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch._C._len_torch_dispatch_stack() > 0 and any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING))
    )


def is_passed_by(owner: object) -> bool:
    """Whether what runs now is none of the owner's business; see `Guard`."""
    guard = getattr(owner, "guard", None)
    return isinstance(guard, Guard) and guard.is_passed_by()


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

        is_fake = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, keywords)) if isinstance(leaf, torch.Tensor))
        if is_fake or is_passed_by(self._torchdebug_owner):
            return run()
        return self._listener(func, args, keywords, run)


class ResultListener(TorchDispatchMode):
    """Calls ``listener(func, args, result)`` after each op, ``failed(func, error)`` where one raises; as cheap as a mode can be.

    Where there is one, ``before(func, args, kwargs)`` is called before each op. `takes_apart`: of an op on a DTensor, what it computes and
    communicates in this process is shown in its place. `sees_compiled`: what is compiled runs eagerly under this mode.
    """

    def __init__(
        self,
        listener: Callable[[Any, tuple[Any, ...], Any], None],
        failed: Callable[[Any, BaseException], None],
        owner: object = None,
        *,
        before: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None,
        takes_apart: bool = False,
        sees_compiled: bool = False,
    ) -> None:
        super().__init__()
        self._torchdebug_owner = owner
        self._listener = listener
        self._failed = failed
        self._before = before
        self._takes_apart = takes_apart
        self._sees_compiled = sees_compiled

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]  # torch asks the mode, not its class
        """Asked by the compiler: whether what first runs under this mode is compiled all the same."""
        return not self._sees_compiled

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Asked when the class is made. Torch's own way to keep the compiler out puts two frames around each op, and into each traceback.
        return False

    @not_compiled(nor_what_it_calls=True)
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        __tracebackhide__ = True
        if self._takes_apart and any(map(is_shard_type, types)):
            return NotImplemented  # it takes itself apart, and its parts come by again
        keywords, is_seen = kwargs or {}, not is_passed_by(self._torchdebug_owner)
        if is_seen and self._before is not None:
            self._before(func, args, keywords)
        written = _lists_written(func, args, keywords)
        versions = [tensor._version for tensor in written]
        try:
            result = func(*args, **keywords)
        except BaseException as error:
            if is_seen:
                self._failed(func, error)
            raise
        if written:
            increment_version([tensor for tensor, version in zip(written, versions, strict=True) if tensor._version == version])
        if is_seen:
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
    tensors: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, (list, tuple)):
            tensors += [tensor for tensor in value if isinstance(tensor, torch.Tensor) and not tensor.is_inference()]
    return tensors


def enter(stack: ExitStack, mode: TorchDispatchMode) -> None:
    """``stack.enter_context(mode)``, which would take off whichever mode stands on top in the end."""
    stack.callback(take_off, mode)
    mode.__enter__()


@contextmanager
def modes_aside() -> Iterator[None]:
    """What runs in here is shown to no mode, neither the user's nor ours. An interrupt would leave them off: it waits."""
    with interrupts_held(), _disable_current_modes():
        yield


def others_listen(owner: object) -> bool:
    """Whether ops are met by a listener of another owner's, too."""
    return any(isinstance(mode, ResultListener) and mode._torchdebug_owner is not owner for mode in modes())


def put_unnoticed(stack: ExitStack, mode: TorchDispatchMode, height: int) -> None:
    """`enter`, with so many below it; torch's compiler is not told that a mode stands there."""
    stack.callback(take_off, mode)
    back = _taken_off(modes()[height:])
    _push_mode(mode)
    _put(back)


def take_off(mode: TorchDispatchMode) -> bool:
    """Take a mode off the stack, from where it stands last; whether it stood there."""
    standing = modes()
    place = next((place for place in reversed(range(len(standing))) if standing[place] is mode), None)
    if place is None:
        return False
    back = _taken_off(standing[place:])
    _put(back[:-1])
    return True


def _taken_off(above: list[TorchDispatchMode]) -> list[Callable[[], object]]:
    """Take these off, the uppermost first; what puts each back."""
    return [_off(mode) for mode in reversed(above)]


def _put(back: list[Callable[[], object]]) -> None:
    for put in reversed(back):
        put()


def _off(mode: TorchDispatchMode) -> Callable[[], object]:
    # What torch notes of the modes below, each keeps while it stands. A user's own `__exit__` may do more, which is not for us to call.
    if getattr(mode, "old_dispatch_mode_flags", None):
        TorchDispatchMode.__exit__(mode, None, None, None)
        return functools.partial(TorchDispatchMode.__enter__, mode)
    _pop_mode()
    return functools.partial(_push_mode, mode)


def is_free() -> bool:
    """Whether no mode of others stands: when it ends, it would take off the uppermost one, whichever that is."""
    return not overrides._get_current_function_mode_stack()


def take_function_mode_off(mode: TorchFunctionMode) -> bool:
    """Take a mode off the stack, where it stands on it; whether it did."""
    if not any(active is mode for active in overrides._get_current_function_mode_stack()):
        return False
    above = []
    while (top := overrides._pop_mode()) is not mode:
        above.append(top)
    for upper in reversed(above):
        overrides._push_mode(upper)
    return True
