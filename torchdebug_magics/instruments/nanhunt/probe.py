"""The nanhunt probe: watches sinks with one reduction a backward, and looks closely only at the step that went wrong."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from torchdebug_magics.errors import NonFiniteError
from torchdebug_magics.instruments.nanhunt import update
from torchdebug_magics.instruments.nanhunt.evidence import Context
from torchdebug_magics.instruments.nanhunt.investigate import Inquiry, Investigator, Outcome
from torchdebug_magics.instruments.nanhunt.replay import Replayer
from torchdebug_magics.instruments.nanhunt.report import Finding, LayerRow, LiveNan, NanReport
from torchdebug_magics.instruments.nanhunt.scaler import live_scalers, skips
from torchdebug_magics.instruments.nanhunt.sentinel import Leaves, survey
from torchdebug_magics.instruments.nanhunt.step import Entries, Entry, frame_chain
from torchdebug_magics.instruments.nanhunt.verdict import sentence
from torchdebug_magics.probing import hooks
from torchdebug_magics.probing.guard import Guard
from torchdebug_magics.probing.tensors import kind_of, largest, tensors_in
from torchdebug_magics.probing.where import locate, user_frame

__all__ = ["NanProbe"]

_MOST_HISTORY = 10_000
_LIVE_HISTORY = 60
_HARMLESS_ENOUGH = 3
_COLLAPSED_RUN = 20
"""Overflow steps in a row after which a scaler is not searching any more."""


class NanProbe:
    """See `nanhunt`."""

    def __init__(self, *, keep_going: bool = False, max_findings: int = 10, layers: bool = False) -> None:
        self._keep_going = keep_going
        self._most = max_findings if keep_going else 1
        self._want_layers = layers
        self._guard = Guard()
        self._entries = Entries(self._left)
        self._replayer = Replayer(self._entries)
        self._investigator = Investigator(self._replayer, self._guard.note)
        self._leaves = Leaves()
        self._depth = 0
        self._steps = self._backwards = self._forwards = self._overflows = self._overflow_run = 0
        self._history: deque[float] = deque(maxlen=_MOST_HISTORY)
        self._losses: deque[float] = deque(maxlen=_MOST_HISTORY)
        self._findings: list[Finding] = []
        self._bad: dict[str, torch.Tensor] = {}
        self._layers: tuple[LayerRow, ...] = ()
        self._layers_step: int | None = None
        self._reproduced: bool | None = None
        self._way = ""
        self._versions: dict[int, int] = {}
        self._last_tensors: tuple[torch.Tensor, ...] = ()
        self._was_bad = False
        self._harmless: dict[int, int] = {}
        self._started_s = self._phase_s = time.perf_counter()
        self._phase = "watching"

    # --- the session's side

    def attach(self, stack: ExitStack) -> None:
        """Watch sinks, optimizer steps and outermost module calls."""
        self._started_s = time.perf_counter()
        self._entries.attach(stack)
        hooks.autograd_calls(stack, "backward", self._around_backward)
        hooks.autograd_calls(stack, "grad", self._around_grad)
        hooks.optimizer_steps(stack, self._before_update, self._after_update)

    def sweep(self) -> None:
        """Remove what an interrupt left."""
        hooks.sweep(self._entries.modules())

    def report(self) -> NanReport:
        """Freeze what was seen."""
        report = NanReport(
            problems=tuple(self._guard.problems),
            found=bool(self._findings),
            finding=self._findings[0] if self._findings else None,
            findings=tuple(self._findings),
            steps_count=self._steps,
            backward_count=self._backwards,
            forward_count=self._forwards,
            overflow_steps_count=self._overflows,
            history=tuple(self._history),
            losses=tuple(self._losses),
            layers=self._layers,
            layers_step=self._layers_step,
            reproduced=self._reproduced,
            replay=self._way,
        )
        return _with_sentence(report)

    def live(self) -> LiveNan:
        """For the live view; any thread may ask."""
        elapsed = time.perf_counter() - self._started_s
        losses, history = self._losses, self._history
        return LiveNan(
            steps_count=self._steps,
            backward_count=self._backwards,
            overflow_steps_count=self._overflows,
            loss=losses[-1] if losses else None,
            history=tuple(history[place] for place in range(-min(len(history), _LIVE_HISTORY), 0)),
            steps_per_s=self._backwards / elapsed if self._backwards and elapsed > 0 else None,
            phase=self._phase,
        )

    def kept(self) -> dict[str, object]:
        """``bad``: the tensors at the birth, by name."""
        return {"bad": self._bad}

    # --- what torch calls

    def _around_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return self._around(original, args, kwargs, keeps=kwargs.get("retain_graph") or kwargs.get("create_graph") or any(args[2:4]))

    def _around_grad(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if kwargs.get("create_graph") or (len(args) > 4 and args[4]):  # noqa: PLR2004 - autograd.grad's fifth argument
            return original(*args, **kwargs)  # a part of a loss that is still to come
        return self._around(original, args, kwargs, keeps=kwargs.get("retain_graph") or any(args[3:4]))

    def _around(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps: bool) -> Any:
        __tracebackhide__ = True
        if self._depth or not self._entries.is_ours():
            return original(*args, **kwargs)  # one that runs inside another, as reentrant checkpointing does
        tensors = tuple(tensors_in(args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))))
        if not self._replayer.active:
            self._was_bad = bool(self._overflow_run) and self._gradients_are_bad()
        self._depth += 1
        try:
            if self._replayer.active:
                return self._replayer.sink_call(original, tensors, *args, **kwargs)
            result = original(*args, **kwargs)
        finally:
            self._depth -= 1
        outcome = self._guard.run("the check of a backward pass", self._check, tensors, result, keeps=bool(keeps))
        self._raise_if_asked(outcome)
        return result

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        __tracebackhide__ = True
        if self._replayer.active:
            self._replayer.update_call()
        if not self._entries.is_ours() or _closure(args, kwargs):
            return
        self._raise_if_asked(self._guard.run("the check before an update", self._check_gradients, optimizer))

    def _after_update(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        __tracebackhide__ = True
        if self._replayer.active or not self._entries.is_ours():
            return
        outcome = self._guard.run("the check after an update", self._check_parameters, optimizer)
        self._steps += 1
        self._entries.step.clear()
        self._raise_if_asked(outcome)

    def _left(self, entry: Entry, output: Any) -> None:
        __tracebackhide__ = True
        self._raise_if_asked(self._guard.run("the check of a model's output", self._check_output, entry, output))

    def _gradients_are_bad(self) -> bool:
        """Before a backward(): whether gradients of an overflow are still there, as in accumulation."""
        gradients = [
            parameter.grad for module in self._entries.entered() for parameter in module.parameters() if parameter.grad is not None
        ]
        return not math.isfinite(survey((), gradients)[1])

    # --- the checks

    def _check(self, tensors: tuple[torch.Tensor, ...], result: Any, *, keeps: bool) -> Outcome | None:
        if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
            return None
        step = self._entries.step
        step.backwards += 1
        leaves = self._leaves.of(_site(), tensors, self._entries.parameters())
        results = [one for one in result if isinstance(one, torch.Tensor)] if isinstance(result, (tuple, list)) else []
        gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
        loss, peak = survey(tensors, [*gradients, *results])
        self._history.append(peak)
        self._losses.append(loss)
        self._versions = {id(gradient): gradient._version for gradient in gradients}
        self._last_tensors = tensors if len(tensors) == 1 and tensors[0].numel() == 1 else ()
        outcome = None
        if not math.isfinite(peak):
            outcome = self._investigate(tensors, leaves)
        else:
            self._overflow_run = 0
            self._look(tensors, leaves)
        self._backwards += 1
        self._entries.settle(self._backwards)
        step.closed = step.closed or not keeps
        if outcome is not None and not self._keep_going:
            self._undo(leaves)
        return outcome

    def _undo(self, leaves: dict[int, torch.Tensor]) -> None:
        """The cell stops here: buffers as they were before the bad step, and no bad gradient left to be applied."""
        for buffers in self._entries.step.buffers:
            buffers.put_back()
        for leaf in leaves.values():
            leaf.grad = None
        self._entries.step.clear()

    def _investigate(self, tensors: tuple[torch.Tensor, ...], leaves: dict[int, torch.Tensor]) -> Outcome | None:
        if len(self._findings) >= self._most:
            return None
        self._phase = f"replaying step {self._steps}"
        try:
            chain = frame_chain(sys._getframe(1))
            outcome = self._investigator.sink(self._entries.step, Inquiry(tensors, leaves, chain, self._context()))
        finally:
            self._phase = "watching"
        if outcome.overflow:
            return self._overflowed(leaves)
        return self._found(outcome)

    def _overflowed(self, leaves: dict[int, torch.Tensor]) -> Outcome | None:
        """A step that a scaler skips; too many of them are a finding of their own."""
        bad = {id(leaf.grad) for leaf in leaves.values() if leaf.grad is not None and kind_of(leaf.grad)}
        if not bad or self._was_bad:
            return None  # a scaled loss out of range alone skips nothing; gradients that were bad before it are the same skip
        self._overflows += 1
        self._overflow_run += 1
        scale = min((scaler.get_scale() for scaler in live_scalers()), default=math.inf)
        if scale >= 1.0 and self._overflow_run < _COLLAPSED_RUN:
            return None
        return self._found(
            Outcome(
                Finding(
                    kind="inf",
                    phase="backward",
                    op=None,
                    module=None,
                    call=None,
                    location=_caller(),
                    step=self._steps,
                    backward=self._backwards,
                    diagnosis="scale_collapse",
                    sink="gradient",
                    sink_kind="inf",
                    weights="weights untouched",
                    explanation=f"the GradScaler skipped {self._overflow_run} steps in a row, its scale fell to {scale:g}: no step is taken any more",
                    fix="find the op that overflows fp16 (run the cell with autocast disabled, or with bfloat16, which needs no scaler)",
                ),
                {},
            )
        )

    def _look(self, tensors: tuple[torch.Tensor, ...], leaves: dict[int, torch.Tensor]) -> None:
        """With ``--layers``: the table of a healthy step, taken at steps 0, 1, 3, 7, ... as each costs a replay."""
        if not self._want_layers or (self._backwards & (self._backwards + 1)):
            return
        inquiry = Inquiry(tensors, leaves, frame_chain(sys._getframe(1)), self._context())
        rows = self._guard.run("the layer table", self._investigator.look, self._entries.step, inquiry)
        if rows:
            self._layers, self._layers_step = rows, self._steps

    def _check_gradients(self, optimizer: torch.optim.Optimizer) -> Outcome | None:
        """Gradients that were written since the last backward(), or by other means."""
        if self._depth:
            return None
        held = [
            (parameter, parameter.grad) for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        changed = [gradient for _, gradient in held if self._overflow_run or self._versions.get(id(gradient)) != gradient._version]
        if not changed or math.isfinite(survey((), changed)[1]) or skips(optimizer) or len(self._findings) >= self._most:
            return None
        leaves: dict[int, torch.Tensor] = {id(one): one for one, _ in held}
        inquiry = Inquiry(self._last_tensors, leaves, frame_chain(sys._getframe(1)), self._context())
        outcome = self._guard.run("the replay up to the update", self._investigator.update, self._entries.step, inquiry)
        if outcome is not None:
            return self._found(outcome)
        parameter, gradient = next((pair for pair in held if kind_of(pair[1])), held[0])
        kind = (
            "nan"
            if not self._overflow_run and bool(torch.isnan(gradient.detach().to_dense() if gradient.is_sparse else gradient).any())
            else "inf"
        )
        name = self._name(parameter)
        finding = Finding(
            kind=kind,
            phase="optimizer",
            op=None,
            module=None,
            call=None,
            location=_caller(),
            step=self._steps,
            backward=self._backwards,
            tensor=name,
            diagnosis="clip_inf",
            sink=f"gradient of {name}",
            sink_kind=kind,
            weights="weights untouched",
            explanation=f"the gradient of {name} was finite after backward() and is not any more: something between the two changed it",
            fix="look at what scales or clips the gradients before step(): a norm that is infinite or 0, a division by a count of 0",
        )
        return self._found(Outcome(finding, {"gradient": gradient.detach()}))

    def _check_parameters(self, optimizer: torch.optim.Optimizer) -> Outcome | None:
        """An update that made a parameter non-finite. On an accelerator this waits for the next backward(), to save a synchronisation."""
        if self._depth or len(self._findings) >= self._most:
            return None
        held = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None]
        if not held or any(parameter.device.type != "cpu" for parameter in held) or math.isfinite(survey((), held)[1]):
            return None
        parameter = next((one for one in held if kind_of(one) and id(one) not in self._entries.bad_from_start), None)
        if parameter is None or self._findings:
            return None
        name = self._name(parameter)
        op = self._guard.run("the second look at an update", update.birth_op, optimizer, parameter)
        slug, explanation, fix = update.cause(optimizer, parameter, name)
        mask = ~torch.isfinite(parameter.detach())
        finding = Finding(
            kind="nan" if bool(torch.isnan(parameter.detach()).any()) else "inf",
            phase="optimizer",
            op=None if op is None else op.name,
            module=None,
            call=None,
            location=_caller(),
            step=self._steps,
            backward=self._backwards,
            tensor=name,
            diagnosis=slug,
            rows=tuple(mask.reshape(mask.shape[0], -1).any(1).nonzero().flatten().tolist()[:20]) if mask.dim() else (),
            index=tuple(mask.nonzero()[0].tolist()),
            bad_count=int(mask.sum()),
            element_count=mask.numel(),
            shape=tuple(mask.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            sink=name,
            weights="weights poisoned",
            explanation=explanation,
            fix=fix,
        )
        return self._found(Outcome(finding, {"output": parameter.detach().clone()}))

    def _check_output(self, entry: Entry, output: Any) -> Outcome | None:
        step, tensors = self._entries.step, list(tensors_in(output))
        if any(tensor.requires_grad for tensor in tensors) or self._depth:
            entry.grows_graph = True
            return None
        self._forwards += 1
        outcome = None
        if not math.isfinite(largest(tensors)) and len(self._findings) < self._most and not self._seen_before(entry):
            outcome = self._investigator.output(step, entry, tensors, self._context())
            outcome = self._found(outcome) if outcome.finding is not None else None
        if not any(one.grows_graph for one in step.entries):
            step.clear()
        return outcome

    def _seen_before(self, entry: Entry) -> bool:
        """Whether this module's bad outputs were looked into and found to be meant, three times over."""
        count = self._harmless.get(id(entry.module), 0)
        self._harmless[id(entry.module)] = count + 1
        if count == _HARMLESS_ENOUGH:
            self._guard.note("a model returns infinities on purpose (a mask, say): its outputs are not looked into any more")
        return count >= _HARMLESS_ENOUGH

    # --- small things

    def _found(self, outcome: Outcome) -> Outcome | None:
        finding = outcome.finding
        if finding is None or self._is_consequence(finding):
            return None
        if not self._findings:
            self._reproduced, self._way, self._bad = outcome.reproduced, outcome.way, outcome.bad
            if outcome.layers:
                self._layers, self._layers_step = outcome.layers, self._steps
        self._findings.append(finding)
        return outcome

    def _is_consequence(self, finding: Finding) -> bool:
        """Whether it follows from an earlier finding: bad weights, or the same line once more."""
        if not self._findings:
            return False
        if finding.phase in {"parameter", "optimizer"}:
            return True
        return any(
            (one.phase, one.op, one.module, one.location, one.tensor)
            == (finding.phase, finding.op, finding.module, finding.location, finding.tensor)
            for one in self._findings
        )

    def _raise_if_asked(self, outcome: Outcome | None) -> None:
        __tracebackhide__ = True
        if outcome is not None and outcome.finding is not None and not self._keep_going:
            _stop(outcome.finding, outcome.bad)

    def _context(self) -> Context:
        return Context(
            step=self._steps,
            backward=self._backwards,
            roots=tuple(self._entries.roots()),
            entries=tuple(self._entries.step.entries),
            history=tuple(self._history)[-100:],
            losses=tuple(self._losses)[-100:],
            bad_from_start=frozenset(self._entries.bad_from_start),
        )

    def _name(self, parameter: torch.Tensor) -> str:
        names = (name for root in self._entries.roots() for name, one in root.named_parameters() if one is parameter)
        return next(names, "a parameter")


def _stop(finding: Finding, bad: dict[str, torch.Tensor]) -> None:
    __tracebackhide__ = True
    raise NonFiniteError(finding.sentence(), finding, bad)


def _with_sentence(report: NanReport) -> NanReport:
    return replace(report, sentence=sentence(report))


def _closure(args: Any, kwargs: Any) -> bool:
    """Whether the step will compute its gradients itself."""
    return any(callable(one) for one in (*args[1:], kwargs.get("closure")))


def _site() -> tuple[object, int]:
    """Which place in the user's program called backward()."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_globals.get("__name__") or "").startswith(("torchdebug_magics", "torch.")):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _caller() -> Any:
    frame = user_frame(sys._getframe(1))
    return None if frame is None else locate(frame)
