"""Module paths, the tree's roots, and which module runs now."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import compress
from threading import get_ident
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.compiler import is_compiling

from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import is_user_code

T = TypeVar("T")
Entered: TypeAlias = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]
Left: TypeAlias = Callable[[torch.nn.Module, Any], None]


def live(kind: type[T]) -> list[T]:
    """Every instance alive in the process. Asks the type, never the object, so that no lazy proxy is woken."""
    return live_kinds(kind)[kind]


def live_kinds(*kinds: type) -> dict[type, list[Any]]:
    """What `live` gives, for several kinds, none of which is a part of another, in one pass."""
    kind_of = {id(line): kind for kind in kinds for line in _lines(kind)}
    known = _MOMENT.get()
    if known is None or not all(issubclass(kind, _OF_TORCH) for kind in kinds):
        objects = _of_kinds(kinds)
    else:
        if not known:
            known += map(weakref.ref, _of_kinds(_OF_TORCH))
        objects = [alive for ref in known if (alive := ref()) is not None and id(type(alive)) in kind_of]
    instances: dict[type, list[Any]] = {kind: [] for kind in kinds}
    for instance in objects:
        instances[kind_of[id(type(instance))]].append(instance)
    return instances


def _of_kinds(kinds: Iterable[type]) -> list[Any]:
    """All instances alive of these types and of those made from them. Half a million objects take some 40 ms."""
    objects, lines = gc.get_objects(), [line for kind in kinds for line in _lines(kind)]
    if any(map(_runs_code, _lines(type))):  # by their ids, which takes twice as long
        return list(compress(objects, map(set(map(id, lines)).__contains__, map(id, map(type, objects)))))
    return list(compress(objects, map(set(lines).__contains__, map(type, objects))))


def _runs_code(metaclass: type) -> bool:
    """Whether to look up a class of it in a set may run code of the user's, or fail."""
    methods = (metaclass.__hash__, metaclass.__eq__)
    return None in methods or any(isinstance(method, FunctionType) and is_user_code(method.__code__) for method in methods)


_OF_TORCH = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
_MOMENT: ContextVar[list[weakref.ref[Any]] | None] = ContextVar("torchdebug_moment", default=None)


@contextmanager
def one_moment() -> Iterator[None]:
    """No code of the user's runs within: what is alive is looked for once, for all who ask. Nothing is kept alive by that."""
    before = _MOMENT.get()
    _MOMENT.set([] if before is None else before)
    try:
        yield
    finally:
        _MOMENT.set(before)


def _lines(kind: type) -> list[type]:
    """A type with all that are made from it."""
    kinds: dict[int, type] = {}
    todo = [kind]
    while todo:
        line = todo.pop()
        if id(line) not in kinds:
            kinds[id(line)] = line
            todo += type.__subclasses__(line)
    return list(kinds.values())


def live_modules() -> Iterator[torch.nn.Module]:
    """Every module alive in the process."""
    return (module for module in live(torch.nn.Module) if "_modules" in getattr(module, "__dict__", ()))


def parts_of(modules: Iterable[torch.nn.Module]) -> dict[int, torch.nn.Module]:
    """All that are a part of another one, by id."""
    return {id(child): child for module in modules for child in module._modules.values() if child is not None}


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether its calls go through a compiler: hooks inside it would be traced."""
    return module._compiled_call_impl is not None if hasattr(module, "_compiled_call_impl") else False


_FAST_PATHS = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)


def fast_path_parts(modules: Iterable[torch.nn.Module]) -> set[int]:
    """The ids of modules that torch runs by a fused kernel in inference, unless one of them carries a hook."""
    return {id(part) for module in modules if isinstance(module, _FAST_PATHS) for part in module.modules()}


def compiled_parts(modules: Iterable[torch.nn.Module]) -> set[int]:
    """The ids of all modules inside compiled ones."""
    return {
        id(part)
        for module in modules
        if is_compiled(module) or unwrapped(module) is not module
        for part in unwrapped(module).modules()
        if part is not module
    }


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module behind ``torch.compile(module)``; any other one itself."""
    inner = module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None
    return module if inner is None else inner


def followed(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The root and its parts, each once, without what is inside scripted ones."""
    return (module for _, module in named_followed(root))


def named_followed(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """What `followed` gives, with their paths."""
    hidden: set[int] = set()
    for path, module in root.named_modules():
        if id(module) not in hidden:
            yield path, module
        if isinstance(module, torch.jit.ScriptModule):
            hidden.update(id(part) for part in module.modules())


def paths(roots: Iterable[torch.nn.Module]) -> dict[int, str]:
    """``id(module)`` -> module path as in `state_dict`, ``""`` for a root; a shared module has the first of its names."""
    path_of: dict[int, str] = {}
    for root in map(unwrapped, roots):
        for path, module in root.named_modules():
            # A name given as a root yields to the name that the whole gives the part.
            if path and path_of.get(id(module)) == "":
                path_of[id(module)] = path
            path_of.setdefault(id(module), path)
    return path_of


@dataclass(frozen=True)
class Call:
    """One running forward of one module."""

    path: str
    number: int
    """1-based, of this module since the watch began."""
    type: str
    module: torch.nn.Module = field(repr=False, compare=False)
    root: torch.nn.Module = field(repr=False, compare=False)


class _Known(NamedTuple):
    path: str
    root: weakref.ref[torch.nn.Module]
    itself: weakref.ref[torch.nn.Module]
    """Tells when the module is gone."""


class ModuleCalls:
    """The stack of running module calls, kept by torch's own global hooks."""

    def __init__(self, roots: Iterable[torch.nn.Module], hooks: Hooks | None = None) -> None:
        self.hooks = hooks or Hooks()
        self._known: dict[int, _Known] = {}
        """What is known of modules, by id, until one is gone: none is kept alive, and its id may then be another's."""
        models = [unwrapped(root) for root in roots]
        named = paths(models)
        for root in models:
            for module in root.modules():
                self._know(module, named[id(module)], root)
        self._counts: dict[int, int] = {}
        self._again: dict[int, int] = {}
        self._running: list[Call | None] = []

    def attach(self, stack: ExitStack) -> None:
        """Follow module calls until the stack closes; it may be closed, and another one be given, in the middle of a call."""
        stack.callback(self._running.clear)
        self.hooks.module_calls(stack, self._enter, self._leave)

    @property
    def current(self) -> Call | None:
        """The innermost running call."""
        return next((call for call in reversed(self._running) if call is not None), None)

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        if is_compiling():
            return  # what is compiled is one piece: a count among its guards would have it compiled anew at each call
        if unwrapped(module) is not module:
            self._running.append(None)
            return
        # What checkpointing runs again inside a backward is not one more call of the step.
        counts = self._again if torch._C._current_autograd_node() is not None else self._counts
        number = counts[id(module)] = counts.get(id(module), 0) + 1
        if id(module) not in self._known:
            self._meet(module)
        known = self._known[id(module)]
        self._running.append(Call(known.path, number, type(module).__name__, module, known.root() or module))

    def _meet(self, module: torch.nn.Module) -> None:
        """Know a module that was made after the watch began: a root, or a part, named by its type, of the call it runs in."""
        outer = self.current
        prefix = f"{outer.path}.{type(module).__name__}".lstrip(".") if outer is not None else ""
        for path, part in module.named_modules(prefix=prefix):
            self._know(part, path, outer.root if outer is not None else module)

    def _know(self, module: torch.nn.Module, path: str, root: torch.nn.Module) -> None:
        """The first that is said of a module holds."""
        key = id(module)
        if key not in self._known:
            self._known[key] = _Known(path, weakref.ref(root), weakref.ref(module, lambda _: self._forget(key)))

    def _forget(self, key: int) -> None:
        for table in (self._known, self._counts, self._again):
            table.pop(key, None)

    def _leave(self, _module: torch.nn.Module, _args: Any, _output: Any) -> None:
        if not is_compiling() and self._running:
            self._running.pop()


class OutermostCalls:
    """Tells of every call of a module that no other module makes, in one thread: the first in which anything was called.

    `entered` may give other arguments, as a pre-hook may. What `entered` and `left` raise reaches the user: they guard themselves.
    """

    def __init__(self, hooks: Hooks, guard: Guard, entered: Entered, left: Left) -> None:
        self._hooks = hooks
        self._guard = guard
        self._entered = entered
        self._left = left
        self.depth = 0
        """How many calls run, one inside another."""
        self._thread: int | None = None
        self._called: set[int] = set()
        self._watched: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        self._parts: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        self._stacks: dict[int, ExitStack] = {}
        self._stack = ExitStack()

    def attach(self, stack: ExitStack, modules: Sequence[torch.nn.Module]) -> None:
        """Watch `modules`, which are all that are alive, and those still to be made."""
        stack.enter_context(self._stack)
        stack.callback(self._forget)
        self._parts.update(parts_of(modules))
        inside = compiled_parts(modules) | fast_path_parts(modules)
        for module in modules:
            if id(module) not in inside:
                self._watch(module)
        self._hooks.module_birth(self._stack, self._born, self._adopted)
        self._hooks.unnoticed(self._stack)

    def modules(self) -> list[torch.nn.Module]:
        """Every module that carries a hook of ours."""
        return list(self._watched.values())

    def is_ours(self) -> bool:
        """Whether this is the thread that trains."""
        if self._thread is None:
            self._thread = get_ident()
        return self._thread == get_ident()

    def settle(self) -> None:
        """Take the hooks off the parts that were never called outermost so far."""
        for key in [key for key in self._watched if key not in self._called and key in self._parts]:
            del self._watched[key]
            self._stacks.pop(key).close()

    def _watch(self, module: torch.nn.Module) -> None:
        if id(module) in self._watched or is_compiled(module) or fast_path_parts([module]) or isinstance(module, torch.jit.ScriptModule):
            return
        if "_forward_pre_hooks" not in module.__dict__:
            return
        self._watched[id(module)] = module
        mine = self._stacks[id(module)] = self._stack.enter_context(ExitStack())
        self._hooks.own_calls(mine, module, self._before, self._after)

    def _born(self, module: torch.nn.Module) -> None:
        self._guard.run("the watch over a new module", self._watch, module)

    def _adopted(self, child: torch.nn.Module) -> None:
        self._parts[id(child)] = child

    def _forget(self) -> None:
        self._watched.clear()
        self._parts.clear()
        self._stacks.clear()

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or not self.is_ours():
            return None
        self.depth += 1
        if self.depth > 1:
            return None
        self._called.add(id(module))
        return self._entered(module, args, kwargs)

    def _after(self, module: torch.nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.is_ours():
            return
        self.depth = max(0, self.depth - 1)
        if not self.depth:
            self._left(module, output)
