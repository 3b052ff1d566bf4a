"""``%shrink model``: cut a model's stacks, prove by a forward before and after that it still is the same model, report; or take it back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, product
from typing import Any

import torch
from torch import nn

from torchdebug_magics.errors import TorchDebugError, error_line, refuse
from torchdebug_magics.format import listed, plural, shape
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.shrink.dry_forward import (
    DryForward,
    LayerFlow,
    Outputs,
    SideBySideError,
    dry_forward,
    likely_inputs,
    timed,
)
from torchdebug_magics.instruments.shrink.report import Proof, ShrinkReport
from torchdebug_magics.instruments.shrink.stacks import (
    Edits,
    Stack,
    costs_of,
    edits_of,
    follow_cut,
    renumber,
    rows_of,
    skip_attention,
    stacks_in,
)
from torchdebug_magics.probing.dry_runs.inputs import Inputs, readings
from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.source.user_code import raised_at
from torchdebug_magics.probing.storages import is_shard

_QUICK_FLOPS = 2e10
"""Up to here, a forward that computes takes about a second."""
_SHARDED = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _NotShrunkError(Exception):
    """The reason, and the error of the forward where there was one."""

    def __init__(self, reason: str, error: Exception | None = None) -> None:
        super().__init__(reason)
        self.reason, self.error = reason, error


def _refuse(is_wrong: object, reason: str) -> None:
    if is_wrong:
        raise _NotShrunkError(reason)


class _Cutter:
    """Finds what the model runs on, then what can be cut."""

    def __init__(self, model: nn.Module, edits: Edits, given: tuple[tuple[Any, ...], dict[str, Any]], layers: int, *, skip: bool) -> None:
        self._model, self._edits, self._given, self._layers, self._skip = model, edits, given, layers, skip
        self._mark = len(edits)
        self._not_stacks: set[int] = set()
        self._stacks: list[Stack] = []
        self._kept: Mapping[Stack, tuple[int, ...]] = {}
        self._skipped = 0
        self._inputs: Inputs
        self._before: DryForward
        self._after: DryForward

    def shrunk(self, device: str) -> ShrinkReport:
        """Cut in place; all is as it was where the forward does not come through."""
        before = costs_of(self._model)
        try:
            self._find_input()
            # Timed on the user's own input, where that takes about a second at most.
            is_own = any(self._given) and self._before.flops is not None and next(self._inputs.specs(), None) is None
            before_s = timed(self._model, self._inputs) if is_own and (self._before.flops or 0) <= _QUICK_FLOPS else None
            self._cut()
            after_s = timed(self._model, self._inputs) if before_s is not None else None
            made = materialise(self._model, device) if device else ()
        except _NotShrunkError as refused:
            self._edits.undo(self._mark)
            rows = rows_of({stack: tuple(range(len(stack.layers))) for stack in self._stacks})
            error, where = error_line(refused.error, 200), str(raised_at(refused.error) or "")
            return ShrinkReport(stacks=rows, before=before, after=before, undone=True, reason=refused.reason, error=error, location=where)
        except BaseException:
            self._edits.undo(self._mark)
            raise
        rows = rows_of(self._kept)
        self._edits.stacks = self._edits.stacks or rows
        return ShrinkReport(
            stacks=rows,
            before=replace(before, flops=self._flops_before, seconds_s=before_s),
            after=replace(costs_of(self._model), flops=self._after.flops, seconds_s=after_s),
            proof=self._before.proof,
            input=self._before.input,
            skipped_attention=self._skipped,
            device=device,
            problems=(*self._before.problems, *notes_on(self._kept, self._inputs), *made),
        )

    def _find_input(self) -> None:
        """The first reading of the input, and the first way, in which the forward of the whole model comes through."""
        names = (kind.__name__ for part in self._model.modules() for kind in type(part).__mro__)
        is_sharded = any(map(is_shard, self._model.parameters()))
        wrapper = next((name for name in names if name in _SHARDED), "a mesh of ranks" if is_sharded else "")
        _refuse(wrapper, f"{wrapper} holds the parameters of every layer: shrink the model first, then wrap it or shard it")
        self._find_stacks()
        error: Exception | None = None
        on_meta = any(parameter.is_meta for parameter in self._model.parameters())  # where nothing can be computed
        proofs: tuple[Proof, ...] = ("meta tensors", "fake tensors") if on_meta else ("fake tensors", "real tensors")
        given = [self._given] if any(self._given) else likely_inputs(self._model)
        for inputs, proof in product((reading for args, kwargs in given for reading in readings(self._model, args, kwargs)), proofs):
            self._inputs, self._before = inputs, dry_forward(self._model, inputs, proof)
            if self._before.error is None:
                return
            error = error or self._before.error
        unknown = "no input was found on which the model runs: write `%shrink model x`"
        raise _NotShrunkError("its forward fails on this input with all layers as well" if any(self._given) else unknown, error)

    @property
    def _flops_before(self) -> int | None:
        """Of the whole model: counted, or those of each layer that went as of the one that stands for it."""
        if self._before.flops is not None or self._after.flops is None:
            return self._before.flops
        total = self._after.flops
        for stack, kept in self._kept.items():
            of_kind = {stack.kinds[place]: self._after.layer_flops.get(id(stack.layers[place]), 0) for place in reversed(kept)}
            total += sum(of_kind[kind] for place, kind in enumerate(stack.kinds) if place not in kept)
        return total

    def _find_stacks(self) -> None:
        self._stacks = stacks_in(self._model, self._layers, self._not_stacks)
        others = self._stacks or stacks_in(self._model, None, self._not_stacks)
        what = "an `nn.ModuleList` or `nn.Sequential` of similar layers that run one after another"
        _refuse(not others, f"the model has no stack of layers: {what}")
        why = f"each stack has at most {plural(self._layers, 'layer')}, or no two layers of the same kind"
        _refuse(not self._stacks and not self._skip, why)

    def _cut(self) -> None:
        """Keep the first plan that is proven; layers that run side by side, as experts, heads or towers do, are no stack."""
        while True:
            try:
                return self._cut_stacks()
            except SideBySideError as mistaken:
                self._edits.undo(self._mark)
                self._not_stacks |= mistaken.containers
                self._find_stacks()

    def _cut_stacks(self) -> None:
        """By the first plan after which the forward comes through; of several stacks, as many as can be cut."""
        if self._layers == 1:  # one layer alone does not show whom it feeds
            flow = LayerFlow(self._stacks)
            dry_forward(self._model, self._inputs, self._before.proof, flow)
            flow.check_chained()
        refused: _NotShrunkError | None = None
        choices = {stack: stack.choices(self._layers) for stack in self._stacks}
        # One layer of each kind; then, where numbers matter to the model, all layers up to the last new kind.
        for place in (0, -1) if any(len(kept) > 1 for kept in choices.values()) else (0,):
            if (failed := self._tried({stack: kept[place] for stack, kept in choices.items()})) is None:
                return
            refused = refused or failed
        proven: dict[Stack, tuple[int, ...]] = {}
        for stack in self._stacks if len(self._stacks) > 1 else []:
            kept = next((kept for kept in choices[stack] if self._tried({**proven, stack: kept}) is None), None)
            proven.update({} if kept is None else {stack: kept})
        if refused is not None and not (proven and self._tried(proven) is None):
            raise refused

    def _tried(self, plan: Mapping[Stack, tuple[int, ...]]) -> _NotShrunkError | None:
        """Take back an earlier plan, cut by this one, and run: why the model does not run as before, or None where the plan stands."""
        self._edits.undo(self._mark)
        for stack, kept in plan.items():
            names = list(stack.container._modules)
            left = {str(new) if names[place].isdigit() else names[place]: stack.layers[place] for new, place in enumerate(kept)}
            self._edits.put(vars(stack.container), "_modules", left)
            follow_cut(stack, kept, self._edits)
            renumber(stack, kept, self._edits)
        skipped = skip_attention(stacks_in(self._model, None, self._not_stacks), self._edits) if self._skip else None
        flow = LayerFlow(list(plan))
        run = dry_forward(self._model, self._inputs, self._before.proof, flow)
        if run.error is not None:
            fewer = listed([plural(amount, "layer") for amount in dict.fromkeys(map(len, plan.values()))])
            reason = f"its forward fails {f'with {fewer}' if plan else 'without attention'}"
        else:
            if self._layers > 1:
                flow.check_chained()
            reason = has_other_outputs(self._before.outputs, run.outputs, {(len(stack.layers), len(kept)) for stack, kept in plan.items()})
            if not reason and skipped is not None and not skipped.has_run:
                known = "`F.scaled_dot_product_attention`, `nn.MultiheadAttention` or the attention interface of transformers"
                reason = f"none of its layers calls {known}"
        if reason:
            self._edits.undo(self._mark)
            return _NotShrunkError(reason, run.error)
        self._kept, self._after, self._skipped = plan, run, 0 if skipped is None else skipped.layers
        return None


def has_other_outputs(before: Outputs, after: Outputs, lengths: Iterable[tuple[int, int]]) -> str:
    """Why these outputs are not those of the same model with fewer layers: a sentence, or nothing.

    `lengths`: how many layers each stack had and has. An output for each layer, such as hidden states, has become as many fewer.
    """
    large, small = _by_name(before), _by_name(after)
    for name, shapes in large.items():
        now, said = small.get(name, []), f"output {name}" if name else "output"
        if not _fits(len(shapes), len(now), lengths):
            return f"its {said} was {plural(len(shapes), 'tensor')} and became {len(now)}: the forward selects layers by number"
        for was, became in zip(shapes, now, strict=False):
            if len(was) != len(became) or not all(_fits(one, other, lengths) for one, other in zip(was, became, strict=True)):
                return f"its {said} was {shape(was)} and became {shape(became)}: these layers change the shape, so all are needed"
    return ""


def _by_name(outputs: Outputs) -> dict[str, list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, sizes in outputs:
        found.setdefault(re.sub(r"\[\d+\]", "", name), []).append(sizes)
    return found


def _fits(before: int, after: int, lengths: Iterable[tuple[int, int]]) -> bool:
    """Whether it is the same amount, or the same for each layer that is left: ``a * layers + b``, where b is no more than a."""
    if before == after:
        return True
    for large, small in lengths:
        each, rest = divmod(before - after, large - small)
        if not rest and each > 0 and 0 <= before - each * large <= each:
            return True
    return False


def notes_on(kept: Mapping[Stack, tuple[int, ...]], inputs: Inputs) -> Iterator[str]:
    """Hooks that no longer run, and a cache of the large model."""
    for stack, left in kept.items():
        gone = [place for place in range(len(stack.layers)) if place not in left]
        hooked = [place for place in gone if any(getattr(part, table, None) for part in stack.layers[place].modules() for table in _HOOKS)]
        if hooked:
            names = listed([f"`{stack.path}`[{place}]" for place in hooked])
            yield f"hooks on {names} do not run while {'this layer is' if len(hooked) == 1 else 'these layers are'} removed"
    amounts = {len(stack.layers) for stack in kept}
    for name, value in inputs.named_values().items():
        entries = getattr(value, "layers", None)
        if isinstance(entries, list) and len(entries) in amounts:
            yield f"`{name}` holds an entry for each layer of the large model: create a new one"


def materialise(model: nn.Module, device: str) -> tuple[str, ...]:
    """Replace each tensor on ``meta`` by one on `device`, ties kept; what nothing has initialized is noted by name."""
    places: list[tuple[nn.Module, dict[str, Any], str, torch.Tensor]] = [
        (module, table, name, tensor)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None and tensor.is_meta
    ]
    if not places:
        return ("no parameter or buffer is on `meta`: nothing was initialized",)
    made: dict[int, torch.Tensor] = {}
    is_whole = all(parameter.is_meta for parameter in model.parameters())
    try:
        for _, table, name, tensor in places:
            table[name] = made.setdefault(id(tensor), _marked(tensor, device))
        _initialize(model, None if is_whole else list(dict.fromkeys(module for module, _, _, _ in places)))
    except BaseException:
        for _, table, name, tensor in places:
            table[name] = tensor
        raise
    ours = set(map(id, made.values()))
    left = [
        f"`{name}`" for name, tensor in chain(model.named_parameters(), model.named_buffers()) if id(tensor) in ours and _is_marked(tensor)
    ]
    return (f"nothing initializes {listed(left)}: set the values yourself",) if left else ()


def _initialize(model: nn.Module, parts: list[nn.Module] | None) -> None:
    """All of it, or only these modules, as the others have their weights."""
    initialize, of_part = getattr(model, "init_weights", None), getattr(model, "_init_weights", None)
    if callable(initialize) and callable(of_part):  # a model of transformers, which does its buffers, too
        for module in parts or ():
            of_part(module)
        if parts is None:
            initialize()
        return
    for module in model.modules() if parts is None else parts:
        for name in ("reset_parameters", "_reset_parameters"):
            if callable(reset := getattr(module, name, None)):
                reset()


def _marked(tensor: torch.Tensor, device: str) -> Any:
    """Full of a value that no initialization leaves; of a kind without such a value, zeros."""
    full = torch.zeros_like(tensor, device=device)
    if tensor.dtype != torch.bool:
        full.fill_(math.nan if tensor.is_floating_point() or tensor.is_complex() else torch.iinfo(tensor.dtype).min)
    return nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full


def _is_marked(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or tensor.dtype == torch.bool:
        return False
    first = tensor.detach().flatten()[:1]
    return bool(torch.isclose(_marked(first, str(first.device)), first, rtol=0.0, atol=0.0, equal_nan=True))


def examine(
    context: CellContext, model: nn.Module, *args: Any, layers: int = 2, skip_attention: bool = False, undo: bool = False, device: str = ""
) -> ShrinkReport:
    """Shrink a live model in place, proven by a forward; with `undo`, restore all layers.

    Raises `TorchDebugError` where the first value is no module, `layers` is less than one, or there is nothing to undo.
    """
    if not isinstance(model, nn.Module):
        msg = f"the first argument must be a torch.nn.Module, not {type(model).__name__}: write `%shrink model`"
        raise TorchDebugError(msg)
    refuse(layers < 1, f"--layers must be at least 1, not {layers}")
    model = unwrapped(model)
    if undo:
        return _restored(model)
    edits = edits_of(model)
    return _Cutter(model, edits, (args, dict(context.keywords)), layers, skip=skip_attention).shrunk(device)


def _restored(model: nn.Module) -> ShrinkReport:
    edits = edits_of(model)
    refuse(not edits, "this model was not shrunk: there is nothing to undo")
    before, stacks, modes = costs_of(model), edits.stacks, {module: module.training for module in model.modules()}
    edits.undo()
    for part in (part for module in modes for part in module.children() if part not in modes):
        part.train(model.training)  # `model.eval()` has not met it meanwhile
    edits.stacks = ()
    return ShrinkReport(stacks=stacks, before=before, after=costs_of(model), undone=True, restored=True, reason="--undo")


@contextmanager
def shrunk(model: nn.Module, *args: Any, layers: int = 2, skip_attention: bool = False, **inputs: Any) -> Iterator[ShrinkReport]:
    """Keep `layers` layers in each stack of the model inside the block; all layers are restored at its end, also after an error.

    `args` and `inputs` go to the forward that proves it, as in a call. Raises `TorchDebugError` where the model cannot be shrunk.
    """
    edits = edits_of(model)
    mark = len(edits)
    try:
        report = examine(CellContext(keywords=inputs), model, *args, layers=layers, skip_attention=skip_attention)
        refuse(report.undone, f"the model cannot be shrunk: {report.reason}")
        yield report
    finally:
        edits.undo(mark)
