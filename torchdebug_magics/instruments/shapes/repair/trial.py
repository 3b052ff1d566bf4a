"""A forward with edits, tried without computing; the user's model is as before when it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.follow.forward import forward, is_limit_of_fakes, real_error
from torchdebug_magics.instruments.shapes.follow.origins import function_name
from torchdebug_magics.instruments.shapes.follow.seen import Forward
from torchdebug_magics.instruments.shapes.repair.edit import CallEdit, OpEdit, Repair, ValueChange
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, facts_of
from torchdebug_magics.instruments.shapes.repair.rules import Diagnosis, diagnosis
from torchdebug_magics.instruments.shapes.repair.source import EditSite
from torchdebug_magics.instruments.shapes.report import Fix
from torchdebug_magics.probing.dry_runs.faking import Fakes
from torchdebug_magics.probing.dry_runs.inputs import Inputs, named_tensors, rebuilt, zeros
from torchdebug_magics.probing.safety import Guard, quiet
from torchdebug_magics.probing.source.user_code import span, user_frame
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.storages import ranks_of

_QUICK_FLOPS = 2e9
"""Up to here a trial that needs data is run on real tensors."""
_WAITING = 3
"""How many times longer than it computes all trials together may take."""
SMALL = 1 << 20
"""Elements up to which an input is changed on real tensors, so that its numbers are known."""
_LARGEST = 2048
_ALONG: dict[int, tuple[type[torch.nn.Module], ...]] = {
    many: tuple(getattr(torch.nn, f"{kind}{many}d") for kind in ("Conv", "ConvTranspose", "MaxPool", "AvgPool")) for many in (1, 2, 3)
}
"""What makes the last dimensions of an input its height and width."""
_MOST = 14
"""How many sizes are tried."""


class Trials:
    """Runs one model with edits, at most so many times and for so long.

    The time is the processor's on this thread: a machine that is busy with other things finds the same fixes. A forward that waits, such as
    for a lock or a file, is kept from waiting for ever by a limit on the clock's.
    """

    def __init__(self, model: torch.nn.Module, inputs: Inputs, *, real: bool = False, most: int = 60, longest_s: float = 6.0) -> None:
        self.model = model
        self.inputs = inputs
        self.guard = Guard()
        """Errors of this package while fixes were tried."""
        self._real = real
        self._most = most
        self._left_s = longest_s
        self._until = time.monotonic() + _WAITING * longest_s
        self._slowest_s = 0.0

    @property
    def left(self) -> bool:
        """Whether one more may be run."""
        return self._most > 0 and self._slowest_s < self._left_s and time.monotonic() < self._until

    def allow(self, many: int) -> None:
        """So many more, for another question; the time stays what it is."""
        self._most = max(self._most, many)

    def run(self, edits: Sequence[Repair]) -> Forward | None:
        """The forward with these edits; None where the outcome is unknown."""
        self._most -= 1
        began = time.thread_time()
        try:
            return self._run(edits)
        finally:
            took_s = time.thread_time() - began
            self._left_s -= took_s
            self._slowest_s = max(self._slowest_s, took_s)

    def _run(self, edits: Sequence[Repair]) -> Forward | None:
        if self._real:
            return self._with(edits, None)
        run = self._with(edits, Fakes())
        if run is None or run.error is None:
            return self._with(edits, None) if run is not None and run.unchecked and self._is_quick(run) else run
        limited = is_limit_of_fakes(run.error)
        if not limited and not run.confirmed and run.failed is not None and run.failed.error is run.error:
            tried, error = real_error(run.failed)
            limited = tried and error is None
        if not limited:
            return run
        return self._with(edits, None) if self._is_quick(run) else None

    def _is_quick(self, run: Forward) -> bool:
        """Whether it may be run on real tensors; never one that would wait for other ranks."""
        parameters = list(self.model.parameters())
        is_whole = ranks_of(parameters) == 1 and not any(parameter.device.type == "meta" for parameter in parameters)
        return is_whole and run.flops <= _QUICK_FLOPS

    def _with(self, edits: Sequence[Repair], fakes: Fakes | None) -> Forward | None:
        inputs: Any = self.inputs
        changes = [(name, change) for edit in edits for name, change in edit.inputs.items()]
        if changes:
            inputs = ChangedInputs(self.inputs, changes)
        try:
            with RandomState.kept(), with_edits(self.model, edits, fakes) as model:
                return forward(model, inputs, fakes, instead=_changed_ops([op for edit in edits for op in edit.ops]), trial=True)
        except Exception:  # noqa: BLE001 - an edit that cannot even be made, such as a permutation of too few dimensions
            return None


@contextmanager
def with_edits(model: torch.nn.Module, edits: Sequence[Repair], fakes: Fakes | None) -> Iterator[torch.nn.Module]:
    """The model with other modules, parameters and calls, put back at the end."""
    with ExitStack() as stack:
        for edit in edits:
            for path, make in edit.modules.items():
                old = model.get_submodule(path)
                with quiet():  # a constructor of the user's may print
                    new = _filled(make(old), old, fakes)
                if not path:
                    model = new
                    continue
                parts = [(module._modules, name) for module in model.modules() for name, child in module._modules.items() if child is old]
                for table, name in parts:
                    stack.callback(table.__setitem__, name, old)
                    table[name] = new
            for path, numbers in edit.attributes.items():
                own = model.get_submodule(path).__dict__
                stack.callback(own.update, {name: own[name] for name in numbers})
                own.update(numbers)
            for path, sizes in edit.parameters.items():
                _put_parameter(model, path, sizes, fakes, stack)
            for call in edit.calls:
                _put_call(model, call, stack)
        yield model


def _filled(new: torch.nn.Module, old: torch.nn.Module, fakes: Fakes | None) -> torch.nn.Module:
    """Made without memory so far: with parameters where those of the old one are."""
    like = next(old.parameters(), None)
    for module in new.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.device.type == "meta":
                    table[name] = _like(tensor, like, fakes)
    return new


def _like(tensor: torch.Tensor, like: torch.Tensor | None, fakes: Fakes | None) -> Any:
    device = torch.device("cpu") if like is None or like.device.type == "meta" else like.device
    with torch.no_grad():
        made = zeros(tuple(tensor.shape), tensor.dtype, device) if fakes is None else fakes.zeros(tuple(tensor.shape), tensor.dtype, device)
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def _put_parameter(model: torch.nn.Module, path: str, sizes: tuple[int, ...], fakes: Fakes | None, stack: ExitStack) -> None:
    owner, _, name = path.rpartition(".")
    table = model.get_submodule(owner)._parameters
    old = table[name]
    stack.callback(table.__setitem__, name, old)
    assert old is not None
    table[name] = _like(torch.nn.Parameter(torch.empty(sizes, dtype=old.dtype, device="meta"), old.requires_grad), old, fakes)


def _put_call(model: torch.nn.Module, call: CallEdit, stack: ExitStack) -> None:
    module = model.get_submodule(call.path)
    inner = module.forward
    own = module.__dict__
    had = own.get("forward")

    def forward_changed(*args: Any, **kwargs: Any) -> Any:
        if call.site is None or _stands_at(call.site):
            args, kwargs = call.arguments(args, kwargs)
            return call.result(inner(*args, **kwargs)) if call.result is not None else inner(*args, **kwargs)
        return inner(*args, **kwargs)

    stack.callback(own.pop, "forward", None) if had is None else stack.callback(own.__setitem__, "forward", had)
    own["forward"] = forward_changed


class ChangedInputs:
    """Inputs of which some tensors are changed before the forward begins."""

    def __init__(self, inputs: Inputs, changes: Sequence[tuple[str, ValueChange]]) -> None:
        self._inputs = inputs
        self._changes = changes
        self.args, self.kwargs = inputs.args, inputs.kwargs

    def made(self, model: torch.nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor], zeros: Callable[..., torch.Tensor]) -> Inputs:
        """As `Inputs.made`."""
        inputs = self._inputs
        for name, change in self._changes:
            inputs = _with_change(inputs.made(model, lambda tensor: tensor, zeros), name, change, stand_in)
        return inputs.made(model, stand_in, zeros)


def _with_change(inputs: Inputs, name: str, change: ValueChange, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    target = dict(named_tensors(inputs.named_values())).get(name)

    def changed(tensor: torch.Tensor) -> Any:
        if tensor is not target:
            return tensor
        with torch.no_grad():
            # A small one for real, so that its numbers stay known.
            return change.apply(tensor if tensor.numel() <= SMALL else stand_in(tensor))

    return replace(inputs, args=rebuilt(inputs.args, changed), kwargs=rebuilt(dict(inputs.kwargs), changed))


def _changed_ops(edits: Sequence[OpEdit]) -> Callable[[Any], Any]:
    """What runs in the place of a function, by where the user's code stands."""

    def instead(func: Any) -> Any:
        name = function_name(func)
        run = next((edit.run for edit in edits if edit.op == name and _stands_at(edit.site)), None)
        return func if run is None else lambda *args, **kwargs: run(func, args, kwargs)

    return instead


def _stands_at(site: EditSite) -> bool:
    frame = user_frame(sys._getframe(1))
    if frame is None or frame.f_code is not site.code:
        return False
    return frame.f_lasti == site.instruction or span(frame.f_code, frame.f_lasti) == span(site.code, site.instruction)


def fitting_sizes(facts: FailureFacts, cause: Diagnosis, trials: Trials) -> tuple[Fix, ...]:
    """A size of the input that lets the forward through, where the mismatching size grows with its height and width (or length)."""
    named = next(((name, tensor) for name, tensor in facts.inputs if tensor.dim() in {3, 4, 5} and tensor.is_floating_point()), None)
    if (cause.fit is None and not cause.rounded) or named is None:
        return ()
    name, tensor = named
    spatial = tensor.dim() - 2
    if not cause.rounded and not any(isinstance(module, _ALONG[spatial]) for module in facts.modules.values()):
        return ()
    now = tensor.shape[-1]
    if len(set(tensor.shape[2:])) != 1 or now < 2:
        return ()
    trials.allow(2 * _MOST)
    search = _Search(name, tensor, spatial, trials)
    if cause.fit is None:
        return search.multiple(now)
    first = search.boundary(now, None, 0) if cause.fit[0] < cause.fit[1] else search.boundary(0, now, 0)
    first = first if first is not None and search.outcome(first) == 0 else None
    kernels = [getattr(module, "kernel_size", 1) for module in facts.modules.values() if isinstance(module, _ALONG[spatial])]
    largest = max((max(kernel) if isinstance(kernel, tuple) else int(kernel) for kernel in kernels), default=1)
    if first is None or first < largest:  # a kernel would see but the padding
        return ()
    if now < first and all(search.outcome(size) == 0 for size in (first + 1, 4 * first)):
        return (_fix(name, f"{_shown(first, spatial)} or more"),)
    beyond = search.boundary(first, None, 1)
    # A range is stated where it ends where it is said to.
    end = ", for example" if beyond is None else f" to {_shown(beyond - 1, spatial)}" if beyond - 1 > first else ""
    return (_fix(name, f"{_shown(first, spatial)}{end}"),)


def _fix(name: str, shown: str) -> Fix:
    return Fix(code=f"input of {shown}", verified=True, why=f"`{name}` of a size that fits the model as it is")


class _Search:
    """How the failing size compares with the wanted one, by the size of the input."""

    def __init__(self, name: str, tensor: torch.Tensor, spatial: int, trials: Trials) -> None:
        self._name = name
        self._tensor = tensor
        self._spatial = spatial
        self._trials = trials
        self._known: dict[int, int | None] = {}

    def outcome(self, size: int) -> int | None:
        """0 where the forward succeeds, -1 where the input is too small, 1 where too large; None where it is unknown."""
        if size not in self._known:
            self._known[size] = self._tried(size) if size >= 1 and len(self._known) < _MOST * 2 and self._trials.left else None
        return self._known[size]

    def _tried(self, size: int) -> int | None:
        sizes = (*self._tensor.shape[:2], *([size] * self._spatial))
        change = ValueChange(str, lambda tensor: tensor.new_zeros(sizes))
        run = self._trials.run([Repair("", inputs={self._name: change})])
        if run is None:
            return None
        if run.error is None:
            return 0
        facts = facts_of(run, guard=self._trials.guard)
        fit = diagnosis(facts).fit
        if fit is None:  # it may have broken before it came there: too small for a kernel or a pool
            return -1 if "small" in facts.text or "greater than" in facts.text else None
        return -1 if fit[0] < fit[1] else 1

    def boundary(self, low: int, high: int | None, limit: int) -> int | None:
        """The first size above `low` whose outcome is at least `limit`; `high` is one, where that is known. None where it was not found."""
        gap = 1
        while high is None:
            outcome = self.outcome(low + gap)
            if outcome is None or low + gap > _LARGEST:
                return None
            low, high, gap = (low + gap, None, 2 * gap) if outcome < limit else (low, low + gap, gap)
        while high - low > 1:
            middle = (low + high) // 2
            outcome = self.outcome(middle)
            if outcome is None:
                return None
            low, high = (middle, high) if outcome < limit else (low, middle)
        return high

    def multiple(self, now: int) -> tuple[Fix, ...]:
        """The next multiple of 2, 4, 8, 16 or 32 that fits, where the next one after it fits, too."""
        for step in (2, 4, 8, 16, 32):
            first = -(-now // step) * step
            if now % step and self.outcome(first) == 0 and self.outcome(first + step) == 0:
                fix = _fix(self._name, _shown(first, self._spatial))
                return (replace(fix, why=f"{fix.why}: a multiple of {step}"),)
        return ()


def _shown(size: int, spatial: int) -> str:
    return f"length {size}" if spatial == 1 else " x ".join([str(size)] * spatial)
