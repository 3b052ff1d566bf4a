"""A batch: cut to a few samples, and split into what the model is given and what the loss function is."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.probing.dry_runs.inputs import rebuilt
from torchdebug_magics.probing.storages import is_shard
from torchdebug_magics.probing.tensors import tensors_in

_LABELS = ("labels", "label", "targets", "target", "y", "label_ids", "start_positions")


@dataclass(frozen=True, eq=False)
class Reading:
    """How a batch is used: the arguments of the model's call, and those of the loss function after the output."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] = ()


def is_label(name: str) -> bool:
    """Whether an argument of that name is what the model is to learn."""
    return name in _LABELS or "label" in name or "target" in name


def samples_in(batch: Any) -> int | None:
    """The length of the first dimension of its first tensor."""
    return next((len(tensor) for tensor in tensors_in(_plain(batch)) if tensor.dim()), None)


def cut(batch: Any, many: int) -> Any:
    """The first samples: of each tensor with a dimension of the batch's size, the first or else the second, and of lists as long."""
    size = samples_in(batch)
    if size is None or size <= many:
        return _plain(batch)

    def part(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            if one.dim() and len(one) == size:
                return one[:many]
            return one[:, :many] if one.dim() > 1 and one.shape[1] == size else one
        is_samples = len(one) == size and not any(isinstance(item, (torch.Tensor, list)) for item in one)
        return one[:many] if is_samples else [rebuilt(item, part, (torch.Tensor, list)) for item in one]

    return rebuilt(_plain(batch), part, (torch.Tensor, list))


def _plain(batch: Any) -> Any:
    """A mapping of any kind, such as a tokenizer's, as a dict."""
    return dict(batch) if isinstance(batch, Mapping) and type(batch) is not dict else batch


def readings(model: torch.nn.Module, batch: Any, loss_function: Any) -> Sequence[Reading]:
    """Ways to use it that the model's signature allows, the likeliest first; all of them where it allows none."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        signature = inspect.signature(lambda *_args, **_kwargs: None)
    ways = list(_of_mapping(signature, batch, loss_function) if isinstance(batch, Mapping) else _of_parts(batch, loss_function))
    return [way for way in ways if _binds(signature, way)] or ways


def _binds(signature: inspect.Signature, reading: Reading) -> bool:
    try:
        signature.bind(*reading.args, **reading.kwargs)
    except TypeError:
        return False
    return True


def _of_parts(batch: Any, loss_function: Any) -> Iterator[Reading]:
    parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if loss_function is None:
        yield Reading(parts)
        yield Reading((batch,))
        yield Reading(parts[:-1] or parts)  # only so that it can be said what is missing
        return
    if len(parts) == 1:
        yield Reading(parts, targets=parts)
        return
    first, *rest = parts
    if isinstance(first, Mapping) and all(isinstance(name, str) for name in first):
        yield Reading((), dict(first), tuple(rest))
    for many in dict.fromkeys((len(parts) - 1, *range(1, len(parts)))):
        yield Reading(parts[:many], targets=parts[many:])
    if isinstance(first, (tuple, list)):
        yield Reading(tuple(first), targets=tuple(rest))


def _of_mapping(signature: inspect.Signature, batch: Mapping[str, Any], loss_function: Any) -> Iterator[Reading]:
    taken, others = signature.parameters, dict(batch)
    targets: tuple[Any, ...] = ()
    if loss_function is not None:
        unknown = (name for name in batch if name not in taken)
        label = next((name for name in _LABELS if name in batch), None) or next(unknown, list(batch)[-1])
        targets = (others.pop(label),)
    yield Reading((), others, targets)
    yield Reading((), {name: value for name, value in others.items() if name in taken}, targets)
    if loss_function is not None:
        yield Reading(tuple(others.values()), {}, targets)
    yield Reading((dict(batch),), {}, targets)


def loss_of(output: Any, targets: tuple[Any, ...], loss_function: Any) -> torch.Tensor:
    """The loss of a model's output. Raises `TorchDebugError` where the model returns none, and there is no loss function."""
    if loss_function is None:
        return _own_loss(output)
    loss = loss_function(_prediction(output, loss_function), *targets)
    if isinstance(loss, (tuple, list)) and loss:
        loss = loss[0]
    elif isinstance(loss, Mapping):
        loss = loss.get("loss", loss)
    if not isinstance(loss, torch.Tensor):
        msg = f"the loss function returned {type(loss).__name__}, not a tensor"
        raise TorchDebugError(msg)
    return _scalar(loss)


def _prediction(output: Any, loss_function: Any) -> Any:
    """What a loss function takes: of several outputs the first, of a model output its logits."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    is_known = isinstance(loss_function, torch.nn.Module) or str(getattr(loss_function, "__module__", "")).startswith("torch.")
    if is_known and isinstance(output, (tuple, list)) and output:
        return _prediction(output[0], loss_function)
    if is_known and isinstance(output, Mapping):
        return next((one for one in output.values() if isinstance(one, torch.Tensor)), output)
    return output


def _own_loss(output: Any) -> torch.Tensor:
    values = list(output.values()) if isinstance(output, Mapping) else []
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return _scalar(loss)
    if values and all(isinstance(value, torch.Tensor) and value.numel() == 1 for value in values):
        return torch.stack([value.reshape(()) for value in values]).sum()
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if isinstance(first, torch.Tensor) and first.numel() == 1:
        return first
    msg = "the model returns no loss: name a loss function, as in `%overfit model batch loss_function`"
    raise TorchDebugError(msg)


def _scalar(loss: torch.Tensor) -> torch.Tensor:
    return loss if loss.numel() == 1 else loss.mean()


def refuse_sharded(tensors: Iterable[torch.Tensor]) -> None:
    """Raise a `TorchDebugError` where one is a DTensor."""
    if any(map(is_shard, tensors)):
        msg = "the model is sharded over ranks: overfit it before `fully_shard`, `parallelize_module` or `distribute_tensor`"
        raise TorchDebugError(msg)
