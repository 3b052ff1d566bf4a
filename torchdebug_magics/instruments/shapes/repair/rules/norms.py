"""Normalisations: as many channels, or last dimensions, as they have weights."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts
from torchdebug_magics.instruments.shapes.repair.rebuild import arguments, rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.earlier import earlier, squeezed, taken_apart
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, gets, producer_edits, reordered, there_and_back
from torchdebug_magics.instruments.shapes.repair.size_history import channels_first, features_last
from torchdebug_magics.instruments.shapes.repair.source import Site
from torchdebug_magics.probing.syntax import enclosing, nodes, tree_of

_BY_CHANNEL = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
_DIMENSIONS = {"1d": (2, 3), "2d": (4,), "3d": (5,)}
_KIND = {2: "1d", 3: "1d", 4: "2d", 5: "3d"}


def norm(facts: Facts) -> Diagnosis | None:
    """Diagnose batch, layer, group and instance norms."""
    module = facts.module
    if not facts.operands:
        return None
    if isinstance(module, nn.PReLU):
        return _slopes(facts, module)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return _last(facts, tuple(module.normalized_shape))
    if isinstance(module, _BY_CHANNEL):
        return _channels(facts, module)
    if facts.op in {"layer_norm", "rms_norm"}:
        wanted = facts.argument(1, "normalized_shape")
        return _last(facts, tuple(wanted)) if wanted is not None else None
    return None


def _last(facts: Facts, wanted: tuple[int, ...]) -> Diagnosis | None:
    x = facts.operands[0]
    got = x.sizes[-len(wanted) :]
    if got == wanted:
        return None
    size = f"{wanted[0]} features" if len(wanted) == 1 else f"its last dimensions to be {shape(wanted)}"
    came = gets(x, got[-1]) if len(wanted) == 1 and got else shape(got)
    if len(wanted) == 1 and (apart := taken_apart(x, wanted[0])) and apart[1]:
        return Diagnosis(f"{facts.who} expects {size}, gets {came}{apart[0]}", apart[1], x)
    edits: list[Edit] = []
    if len(wanted) == 1:
        edits += [*reordered(facts, 0, -1, wanted[0]), *there_and_back(facts, 0, -1, wanted[0])]
    if not (edits and channels_first(x.made) and x.sizes[1] == wanted[0]):  # made for the width, it would only come through
        edits += rebuilt_module(facts.module, facts.path, normalized_shape=got[0] if len(got) == 1 else got)
    if len(wanted) == 1:
        edits += producer_edits(facts, x, got[-1], wanted[0]) if got else []
    return Diagnosis(f"{facts.who} expects {size}, gets {came}", tuple(edits), x)


def _channels(facts: Facts, module: nn.Module) -> Diagnosis | None:
    x = facts.operands[0]
    wanted = int(getattr(module, "num_features", getattr(module, "num_channels", 0)))
    fits = next((many for end, many in _DIMENSIONS.items() if type(module).__name__.endswith(end)), None)
    if (
        fits is not None
        and len(x.sizes) not in fits
        and not (len(x.sizes) == fits[-1] - 1 and isinstance(module, nn.modules.instancenorm._InstanceNorm))
    ):
        return _dimensions(facts, module, fits)
    at = 1 if len(x.sizes) > 1 and (fits is None or len(x.sizes) >= fits[-1] or len(x.sizes) == 2) else 0
    got = x.sizes[at]
    if got == wanted:
        return _one_value(facts)
    sentence = f"{facts.who} expects {wanted} channels, gets {gets(x, got, at)}"
    if at and (len(x.sizes) == 3 or features_last(x.made)) and x.sizes[-1] == wanted and not channels_first(x.made):
        return Diagnosis(f"{sentence}: its channels are last in {shape(x.sizes)}", tuple(_channels_last(facts, module, at, wanted)), x)
    if found := earlier(facts, x, wanted, at - len(x.sizes)):
        return Diagnosis(sentence + found.words, found.edits, x)
    edits = [] if channels_first(x.made) else reordered(facts, 0, at, wanted)
    groups = getattr(module, "num_groups", 1)
    channels = "num_features" if hasattr(module, "num_features") else "num_channels"
    edits += rebuilt_module(module, facts.path, **dict[str, Any]({channels: got}))
    if got % groups:
        fewer = max(one for one in range(1, groups + 1) if got % one == 0)
        edits += rebuilt_module(module, facts.path, num_channels=got, num_groups=fewer, rank=22)
    edits += producer_edits(facts, x, got, wanted)
    return Diagnosis(sentence, tuple(edits), x)


def _channels_last(facts: Facts, module: nn.Module, at: int, wanted: int) -> list[Edit]:
    """Features last, as a Linear returns them: permuted for the norm and back, or a norm that takes them so."""
    edits = [*there_and_back(facts, 0, at, wanted, rank=3), *reordered(facts, 0, at, wanted)]
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        why = f"normalizes each row over its features; a {type(module).__name__} expects channels in dimension 1"
        with torch.device("meta"):
            edits += rebuilt_module(nn.LayerNorm(wanted, module.eps), facts.path, rank=30, why=why)
    return edits


def _slopes(facts: Facts, module: nn.PReLU) -> Diagnosis | None:
    """PReLU has one slope for all, or one a channel."""
    x = facts.operands[0]
    got, wanted = x.sizes[1] if len(x.sizes) > 1 else 1, module.weight.numel()
    if wanted in {got, 1}:
        return None
    edits = rebuilt_module(module, facts.path, num_parameters=got) + producer_edits(facts, x, got, wanted)
    return Diagnosis(f"{facts.who} has weights for {wanted} channels, gets {gets(x, got, 1 - len(x.sizes))}", tuple(edits), x)


def _dimensions(facts: Facts, module: nn.Module, fits: tuple[int, ...]) -> Diagnosis:
    x = facts.operands[0]
    many = " or ".join(map(str, fits))
    kind_of = f" is a {type(module).__name__}, which" if facts.path else ""
    sentence = f"{facts.who}{kind_of} expects {many} dimensions, gets {len(x.sizes)}: {shape(x.sizes)}"
    if found := squeezed(facts, x):
        return Diagnosis(sentence + found.words, found.edits, x)
    edits: list[Edit] = []
    kind = _KIND.get(len(x.sizes))
    other = getattr(nn, type(module).__name__[:-2] + kind, None) if kind else None
    if other is not None and len(x.sizes) > 1:
        edits += _as_kind(facts, module, other, x.sizes[1])
    if len(x.sizes) == fits[-1] - 1:
        edits += on_operand(facts, 0, method("unsqueeze", 0), rank=25, why="a batch of 1")
    return Diagnosis(sentence, tuple(edits), x)


def _as_kind(facts: Facts, module: nn.Module, other: type[nn.Module], channels: int) -> list[Edit]:
    found = arguments(module)
    if found is None:
        return []
    with_meta = other(channels, device="meta")
    for name in ("eps", "momentum", "affine", "track_running_stats"):
        setattr(with_meta, name, getattr(module, name))
    return rebuilt_module(with_meta, facts.path, rank=12)


def _one_value(facts: Facts) -> Diagnosis | None:
    if "more than 1" not in facts.text:
        return None
    x = facts.operands[0]
    sentence = f"{facts.who} normalizes over the batch and needs 2 values per channel in training, gets {shape(x.sizes)}"
    return Diagnosis(sentence, tuple(left_out(facts) or _evaluated(facts)), x)


def _evaluated(facts: Facts) -> list[Edit]:
    parts = {path: _in_evaluation for path, one in facts.modules.items() if isinstance(one, nn.modules.batchnorm._NormBase)}
    if "" in parts or facts.path is None:
        return []
    parts[facts.path] = _in_evaluation
    return [Edit("model.eval()", "for inference; or use a larger batch", 10, modules=parts)]


def _in_evaluation(old: nn.Module) -> nn.Module:
    one = copy.copy(old)
    one.__dict__ = dict(old.__dict__)
    return one.eval()


def left_out(facts: Facts) -> list[Edit]:
    """The edit that leaves a last batch of one row out; it is tried with a batch of two.

    None where the model is not called in a loop over a loader that ends with such a batch.
    """
    for name, loader in _loaders(facts.caller.site) if facts.caller is not None else ():
        if (sizes := _sizes(loader)) is not None:
            ones = [one for one, tensor in facts.inputs if tensor.dim() and tensor.shape[0] == 1]
            twice = Change(lambda x: x, lambda tensor: torch.cat([tensor, tensor]))
            why = "{} rows in batches of {} leave a last one of a single row".format(*sizes)
            return [Edit(f"{name} = DataLoader(..., batch_size={sizes[1]}, drop_last=True)", why, 5, inputs=dict.fromkeys(ones, twice))]
    return []


def _loaders(site: Site) -> Iterator[tuple[str, DataLoader[Any]]]:
    """Those that the loops around a line go through, by name."""
    loops = (loop for loop in enclosing(tree_of(site.code.co_filename), site.line) if isinstance(loop, ast.For))
    for part in nodes(ast.Name, *(loop.iter for loop in loops)):
        if isinstance(loader := site.names.get(part.id), DataLoader):
            yield part.id, loader


def _sizes(loader: DataLoader[Any]) -> tuple[int, int] | None:
    size = loader.batch_size
    try:
        rows = len(loader.sampler)  # type: ignore[arg-type]  # not every sampler has a length
    except (TypeError, NotImplementedError):
        return None
    return (rows, size) if size is not None and size > 1 and not loader.drop_last and rows % size == 1 else None
