"""A batch: cut to a few samples, and split into what the model is given and what the loss function is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    return next((len(one) for one in tensors_in(_plain(batch)) if one.dim()), None)


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
        return one[:many] if len(one) == size and not any(isinstance(item, (torch.Tensor, list)) for item in one) else one

    whole = _plain(batch)
    return rebuilt(whole, part, (torch.Tensor,)) if not _has_lists(whole) else _cut_lists(whole, part)


def _has_lists(batch: Any) -> bool:
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return any(isinstance(one, list) for one in values)


def _cut_lists(batch: Any, part: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Mapping):
        return {name: _cut_lists(one, part) for name, one in batch.items()}
    if isinstance(batch, torch.Tensor):
        return part(batch)
    if isinstance(batch, list):
        kept = part(batch)
        return kept if kept is not batch else [_cut_lists(one, part) for one in batch]
    return tuple(_cut_lists(one, part) for one in batch) if type(batch) is tuple else batch


def _plain(batch: Any) -> Any:
    """A mapping of any kind, such as a tokenizer's, as a dict."""
    return dict(batch) if isinstance(batch, Mapping) and type(batch) is not dict else batch


def readings(model: torch.nn.Module, batch: Any, loss_function: Any) -> Iterator[Reading]:
    """Ways to use it, the likeliest first."""
    if isinstance(batch, Mapping):
        yield from _of_mapping(model, batch, loss_function)
        return
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
    needed, most = _positional(model)
    counts = [many for many in (len(parts) - 1, needed, *range(1, len(parts))) if 1 <= many < len(parts) and needed <= many <= most]
    if isinstance(first, (tuple, list)) and len(parts) == 2 and needed > 1:  # noqa: PLR2004 - inputs and targets
        yield Reading(tuple(first), targets=tuple(rest))
    for many in dict.fromkeys(counts):
        yield Reading(parts[:many], targets=parts[many:])
    if isinstance(first, (tuple, list)):
        yield Reading(tuple(first), targets=tuple(rest))
    yield Reading((first,), targets=tuple(rest))


def _of_mapping(model: torch.nn.Module, batch: Mapping[str, Any], loss_function: Any) -> Iterator[Reading]:
    taken = _names(model)
    if loss_function is None:
        yield Reading((), dict(batch))
        yield Reading((), {name: value for name, value in batch.items() if name in taken})
        yield Reading((dict(batch),))
        return
    label = next((name for name in _LABELS if name in batch), None) or next(
        (name for name in batch if taken and name not in taken), list(batch)[-1]
    )
    others = {name: value for name, value in batch.items() if name != label}
    yield Reading((), others, (batch[label],))
    yield Reading((), {name: value for name, value in others.items() if name in taken}, (batch[label],))
    yield Reading(tuple(others.values()), {}, (batch[label],))
    yield Reading((dict(batch),), {}, (batch[label],))


def _signature(model: torch.nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def _positional(model: torch.nn.Module) -> tuple[int, int]:
    """How many arguments it needs, and how many it takes at most."""
    found = _signature(model)
    if not found or any(one.kind is one.VAR_POSITIONAL for one in found):
        return 1, 1 << 10
    places = [one for one in found if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    return sum(one.default is one.empty for one in places), len(places)


def _names(model: torch.nn.Module) -> set[str]:
    return {one.name for one in _signature(model) if one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY}}


def loss_of(output: Any, targets: tuple[Any, ...], loss_function: Any) -> torch.Tensor:
    """The loss of a model's output. Raises `TorchDebugError` where the model returns none, and there is no loss function."""
    if loss_function is None:
        return _own_loss(output)
    given = _prediction(output, loss_function)
    loss = loss_function(given, *targets)
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
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return _scalar(loss)
    if isinstance(output, Mapping) and output and all(isinstance(one, torch.Tensor) and one.numel() == 1 for one in output.values()):
        return torch.stack([one.reshape(()) for one in output.values()]).sum()
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if isinstance(first, torch.Tensor) and first.numel() == 1:
        return _scalar(first)
    msg = "the model returns no loss: name a loss function, as in `%overfit model batch loss_function`"
    raise TorchDebugError(msg)


def _scalar(loss: Any) -> torch.Tensor:
    if isinstance(loss, (tuple, list)) and loss and isinstance(loss[0], torch.Tensor):
        loss = loss[0]
    if isinstance(loss, Mapping) and isinstance(loss.get("loss"), torch.Tensor):
        loss = loss["loss"]
    if not isinstance(loss, torch.Tensor):
        msg = f"the loss function returned {type(loss).__name__}, not a tensor"
        raise TorchDebugError(msg)
    return loss if loss.numel() == 1 else loss.mean()


def refuse_sharded(tensors: Iterable[torch.Tensor]) -> None:
    """Raise a `TorchDebugError` where one is a DTensor."""
    if any(map(is_shard, tensors)):
        msg = "the model is sharded over ranks: overfit it before `fully_shard`, `parallelize_module` or `distribute_tensor`"
        raise TorchDebugError(msg)
