"""What tensors and nodes of the autograd graph hold, read where torch keeps it: no unpack hook runs, nor a property of a subclass."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

import torch

from torchdebug_magics.memory.containers import Named, place
from torchdebug_magics.memory.outside import is_a, names_of_type
from torchdebug_magics.probing.storages import held_of

_BASE: Any = torch._C.TensorBase
_FUNCTION: Any = torch._C._FunctionBase
_ADDRESS: Any = torch._C._storage_address  # type: ignore[attr-defined]  # its stub is missing
T = TypeVar("T")
_RAW = "_raw_saved_"
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def addresses_of(value: Any) -> tuple[int, ...]:
    """The `_cdata` of each storage that a tensor or a storage stands for; none for any other object."""
    if is_a(type(value), torch.UntypedStorage):
        return (torch.UntypedStorage._cdata.__get__(value),)
    return _of_each_part(value, _ADDRESS) if is_a(type(value), _BASE) else ()


def storages_of(value: Any) -> tuple[torch.UntypedStorage, ...]:
    """The storages themselves."""
    if is_a(type(value), torch.UntypedStorage):
        return (value,)
    return _of_each_part(value, _BASE.untyped_storage) if is_a(type(value), _BASE) else ()


def _of_each_part(tensor: Any, ask: Callable[[Any], T]) -> tuple[T, ...]:
    """A sparse tensor consists of several; of a DTensor, the part in this process: it has no memory itself."""
    tensor = held_of(tensor)
    parts = _PARTS.get(_BASE.layout.__get__(tensor), ())
    try:
        if not parts:
            return (ask(tensor),)
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            return tuple(ask(getattr(_BASE, part)(tensor)) for part in parts)
    except (RuntimeError, NotImplementedError):  # it has no storage: of a function transform, or opaque
        return ()


def shown_bytes(tensor: Any) -> int | None:
    """Of the memory that it stands for: less than all of it for a part; None for one that is no strided tensor."""
    if not is_a(type(tensor), _BASE) or _BASE.layout.__get__(tensor) is not torch.strided:
        return None
    tensor = held_of(tensor)
    return int(_BASE.numel(tensor) * _BASE.element_size(tensor))


def history_of(tensor: torch.Tensor) -> Any | None:
    """The node that made it; None for one without a history."""
    return _BASE.grad_fn.__get__(tensor)


# --- tensors ---------------------------------------------------------------------------------------------------------------------


def names_in_tensor(tensor: torch.Tensor) -> Named:
    """Its gradient, its history, what it is a view of, and hooks; attributes are those of any object."""
    # That of others torch warns about.
    if _BASE.is_leaf.__get__(tensor) or _BASE.retains_grad.__get__(tensor):
        yield ".grad", _BASE.grad.__get__(tensor)
    yield ".grad_fn", _BASE.grad_fn.__get__(tensor)
    yield "._base", _BASE._base.__get__(tensor)
    yield "._backward_hooks", _BASE._backward_hooks.__get__(tensor)
    yield "._post_accumulate_grad_hooks", _BASE._post_accumulate_grad_hooks.__get__(tensor)


# --- nodes -----------------------------------------------------------------------------------------------------------------------


def is_node(kind: type) -> bool:
    """Whether it is a type of torch's for nodes of the graph, or of a `torch.autograd.Function`."""
    return is_a(kind, _FUNCTION) or ("next_functions" in names_of_type(kind) and "_register_hook_dict" in names_of_type(kind))


def saved_in(node: Any) -> Named:
    """What it has saved for backward, with names."""
    kind: Any = type(node)
    if is_a(kind, _FUNCTION):
        yield from ((f".saved_tensors{place(at)}", held) for at, held in enumerate(_raw(_FUNCTION._raw_saved_tensors, node)))
    for name in () if is_a(kind, _FUNCTION) else _saved_names(kind):
        held, saved = list(_raw(names_of_type(kind)[name], node)), name.removeprefix("_raw_")
        yield from ((f".{saved}{place(at) if len(held) > 1 else ''}", one) for at, one in enumerate(held))


def names_in_node(node: Any) -> Named:
    """What it holds, with names; the attributes of a ``ctx`` are those of any object."""
    kind: Any = type(node)
    yield from saved_in(node)
    if "variable" in names_of_type(kind):
        yield ".variable", names_of_type(kind)["variable"].__get__(node)
    yield from ((f" -> {_name(node)}", node) for node in next_nodes(node))


def all_in(names: Callable[[Any], Named]) -> Callable[[Any], Iterator[object]]:
    """What an object holds: what has one of those names, and all of which the collector knows."""

    def held_by(value: Any) -> Iterator[object]:
        yield from (held for _, held in names(value))
        yield from gc.get_referents(value)

    return held_by


in_tensor, in_node = all_in(names_in_tensor), all_in(names_in_node)


def next_nodes(node: Any) -> list[Any]:
    """The nodes before it, as far as they are."""
    reader = _FUNCTION.next_functions if is_a(type(node), _FUNCTION) else names_of_type(type(node))["next_functions"]
    return [one for one, _ in reader.__get__(node) if one is not None]


def is_used_up(node: Any) -> bool:
    """Whether a backward pass has let go what it had saved, so that none can run through it again."""
    kind: Any = type(node)
    try:
        if is_a(kind, _FUNCTION):
            _FUNCTION._raw_saved_tensors.__get__(node)
            return False
        for name in _saved_names(kind):
            saved = names_of_type(kind)[name].__get__(node)
            # What was packed by a hook has data: so none of the user's is run.
            if not isinstance(saved, (tuple, list)) and saved is not None and saved.data is None:
                names_of_type(kind)[name.replace("_raw", "", 1)].__get__(node)
    except RuntimeError:
        return True
    except AttributeError:
        return False
    return False


def _name(node: Any) -> str:
    return type(node).__name__ if is_a(type(node), _FUNCTION) else str(node.name())


@lru_cache(maxsize=512)
def _saved_names(kind: Any) -> tuple[str, ...]:
    """Of a type of torch's own, which is there as long as the process is."""
    return tuple(name for name in names_of_type(kind) if name.startswith(_RAW))


def _raw(reader: Any, node: Any) -> Iterator[object]:
    """What was packed, as it lies there: `_saved_self` would call the user's unpack hook."""
    try:
        saved = reader.__get__(node)
        for one in saved if isinstance(saved, (tuple, list)) else (saved,):
            yield one.data
    except (RuntimeError, AttributeError):  # given back after the backward pass, or None
        return
