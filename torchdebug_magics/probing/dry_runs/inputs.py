"""What the model is called with: values as they are, sizes such as ``(1, 3, 224, 224)`` as tensors of the model's kind."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import listed

_WHOLE_NUMBERED = ("ids", "idx", "index", "indices", "tokens", "labels", "target", "targets", "length", "lengths", "lens")
_SIZES = ("size", "shape", "sizes")
_DEEP = 8


@dataclass(frozen=True)
class Spec:
    """A tensor that the user described by its sizes alone."""

    sizes: tuple[int, ...]
    whole_numbers: bool = False
    dtype: torch.dtype | None = None
    """The dtype that was asked for; None for the likeliest."""

    def made(self, model: torch.nn.Module, zeros: Callable[..., torch.Tensor]) -> torch.Tensor:
        """``zeros(sizes, dtype, device)``, a valid index too, in the model's dtype and where it lives."""
        first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
        device = first.device if first is not None else torch.device("cpu")
        dtype = (
            self.dtype or torch.int64
            if self.dtype or self.whole_numbers
            else first.dtype
            if first is not None
            else torch.get_default_dtype()
        )
        return zeros(self.sizes, dtype, device)


@dataclass(frozen=True)
class Inputs:
    """Arguments of the call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...] = ()
    """The names of the parameters that `args` go to."""
    note: str = ""
    caller: Any = field(default=None, repr=False)
    """The user's own call, as whoever reads it in the source knows it; or None."""
    are_named: bool = True
    """Whether they are a forward's own, by which sizes are explained, and not just what stands in an expression."""

    def made(self, model: torch.nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor], zeros: Callable[..., torch.Tensor]) -> Inputs:
        """The same arguments, each tensor replaced by its stand-in and each description by a tensor."""
        return self._with(lambda value: value.made(model, zeros) if isinstance(value, Spec) else stand_in(value))

    def specs(self) -> Iterator[tuple[str, Spec]]:
        """The tensors that are described by their sizes, with their names."""
        for name, value in self.named_values().items():
            specs: list[Spec] = []
            rebuilt(value, lambda spec, specs=specs: specs.append(spec) or spec, (Spec,))
            yield from ((name, spec) for spec in specs)

    def chosen(self, whole: Iterable[bool]) -> Inputs:
        """The same inputs, with whole numbers for the specs where `whole` says so, in their order."""
        choices = iter(whole)
        return self._with(lambda spec: replace(spec, whole_numbers=next(choices)), (Spec,))

    def _with(self, change: Callable[[Any], Any], kinds: tuple[type, ...] = (torch.Tensor, Spec)) -> Inputs:
        args = tuple(rebuilt(value, change, kinds) for value in self.args)
        return replace(self, args=args, kwargs={name: rebuilt(value, change, kinds) for name, value in self.kwargs.items()})

    def named_values(self) -> dict[str, Any]:
        """The arguments by the names that the forward has for them."""
        return {**dict(zip(self.names, self.args, strict=False)), **self.kwargs}

    def __str__(self) -> str:
        tensors = list(named_tensors(self.named_values()))
        shown = [f"{name} {' x '.join(map(str, sizes(x))) or 'scalar'} {str(x.dtype).removeprefix('torch.')}" for name, x in tensors]
        return listed(shown)


def model_of(called: object) -> torch.nn.Module | None:
    """The model whose call it is: a module itself, or its bound ``forward``."""
    owner = getattr(called, "__self__", None) if getattr(called, "__name__", "") == "forward" else called
    return owner if isinstance(owner, torch.nn.Module) else None


def readings(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Inputs]:
    """Ways to understand the arguments, the likeliest first."""
    signature = _signature(model)
    args, kwargs, note = _spread(signature, args, dict(kwargs))
    names = _names(signature, len(args))
    given = Inputs(args, kwargs, names, note)
    described = Inputs(
        tuple(_described(signature, name, value) for name, value in zip(names, args, strict=True)),
        {name: _described(signature, name, value) for name, value in kwargs.items()},
        names,
        note,
    )
    count = sum(1 for _ in described.specs())
    if not count:
        yield given
        return
    likely = [_begins_with_embedding(model) or name.rpartition("_")[2] in _WHOLE_NUMBERED for name, _ in described.specs()]
    only_first = [place == 0 for place in range(count)]
    seen: list[list[bool]] = []
    for whole in (likely, only_first, [not is_whole for is_whole in likely], [False] * count):
        if whole not in seen:
            seen.append(whole)
            yield described.chosen(whole)
    yield given  # the tuples were meant as tuples


def _signature(model: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return {}


def _names(signature: Mapping[str, inspect.Parameter], many: int) -> tuple[str, ...]:
    positional = [name for name, param in signature.items() if param.kind in {param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD}]
    rest = next((name for name, param in signature.items() if param.kind is param.VAR_POSITIONAL), "input")
    return tuple(positional[at] if at < len(positional) else f"{rest}[{at - len(positional)}]" for at in range(many))


def _spread(
    signature: Mapping[str, inspect.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], str]:
    """One mapping alone whose keys are names of the forward's parameters stands for keyword arguments, as a tokenizer's batch does."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping) and args[0] and all(isinstance(key, str) for key in args[0]):
        open_ended = any(param.kind is param.VAR_KEYWORD for param in signature.values())
        first = next(iter(signature.values()), None)
        wants_mapping = first is not None and any(word in str(first.annotation).lower() for word in ("dict", "mapping"))
        if not wants_mapping and (set(args[0]) <= set(signature) or (open_ended and set(args[0]) & set(signature))):
            return (), dict(args[0]), "the mapping was passed as keyword arguments"
    return args, kwargs, ""


def _described(signature: Mapping[str, inspect.Parameter], name: str, value: Any) -> Any:
    """`value` with sizes read as tensors, also those inside a tuple or a dict."""
    if isinstance(value, (tuple, torch.Size)) and all(type(size) is int and size >= 0 for size in value):
        return value if _wants_tuple(signature.get(name), name) else Spec(tuple(value))
    if isinstance(value, slice) and isinstance(value.start, tuple) and isinstance(value.stop, str):
        return Spec(tuple(value.start), dtype=_dtype(value.stop))
    if type(value) is dict:
        return {key: _described({}, str(key), item) for key, item in value.items()}
    if type(value) in {tuple, list} and all(type(item) is tuple for item in value):
        return type(value)(_described({}, name, item) for item in value)
    return value


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        msg = f"there is no dtype {name!r}: write one of torch's, as in `(2, 5):int64`"
        raise TorchDebugError(msg)
    return dtype


def _wants_tuple(parameter: inspect.Parameter | None, name: str) -> bool:
    """Whether a tuple of numbers is what the forward takes there."""
    if any(name.endswith(word) for word in _SIZES):
        return True
    if parameter is None:
        return False
    by_default = isinstance(parameter.default, (tuple, int)) and not isinstance(parameter.default, bool)
    return by_default or any(word in str(parameter.annotation).lower() for word in ("tuple", "size", "sequence[int", "list[int"))


def _begins_with_embedding(model: torch.nn.Module) -> bool:
    leaf = next((module for module in model.modules() if next(iter(module._parameters.values()), None) is not None), None)
    return isinstance(leaf, (torch.nn.Embedding, torch.nn.EmbeddingBag))


def zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A real tensor for a described one."""
    return torch.zeros(sizes, dtype=dtype, device=device)


def named_tensors(value: object, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """``("logits", tensor)`` for each tensor in nested tuples, lists, mappings and dataclasses; an empty name for a bare one."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < _DEEP:
        for key, item in _items(value):
            yield from named_tensors(item, f"{name}{key}" if key.startswith("[") else f"{name}.{key}".lstrip("."), depth + 1)


def _items(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, PackedSequence):
        yield "data", value.data
        yield "batch_sizes", value.batch_sizes
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (tuple, list)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))


def sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its shape; of sizes that differ from row to row, as in a nested tensor, the first is there, and -1 for one that is."""
    if is_lazy(tensor):
        return ()
    if tensor.is_nested and tensor.layout == torch.strided:
        return (tensor.size(0),)
    return tuple(map(_whole, tensor.shape))


def _whole(size: Any) -> int:
    if isinstance(size, int):
        return size
    return -1 if size.node.is_nested_int() else int(size.node.hint)


def rebuilt(value: Any, change: Any, kinds: tuple[type, ...] = (torch.Tensor,), depth: int = 0) -> Any:
    """`value` with each tensor replaced by ``change(tensor)``; what cannot be rebuilt (a packed sequence) is left as it is."""
    if isinstance(value, kinds):
        return change(value)
    if depth >= _DEEP or isinstance(value, PackedSequence):
        return value
    if isinstance(value, (tuple, list, Mapping)):
        return _container(value, change, kinds, depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: rebuilt(getattr(value, field.name), change, kinds, depth + 1) for field in dataclasses.fields(value) if field.init
        }
        return value if all(fields[name] is getattr(value, name) for name in fields) else dataclasses.replace(value, **fields)
    return value


def _container(value: Any, change: Any, kinds: tuple[type, ...], depth: int) -> Any:
    before = list(value.values() if isinstance(value, Mapping) else value)
    items = [rebuilt(item, change, kinds, depth) for item in before]
    if all(new is old for new, old in zip(items, before, strict=True)):
        return value
    if isinstance(value, Mapping):
        return _mapping(value, dict(zip(value, items, strict=True)))
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _mapping(value: Any, new: dict[Any, Any]) -> Any:
    """A mapping of the same type where it can be made from a dict, as a user's forward may ask for attributes (`batch.input_ids`)."""
    if type(value) is dict:
        return new
    try:
        made = type(value)(new)
    except Exception:  # noqa: BLE001 - any constructor of the user's
        return new
    return made if len(made) == len(new) else new
