"""What is looked at, and when: at each backward(), around each update, at the output of each model that runs without gradients."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.nanhunt.causes.evidence import Context
from torchdebug_magics.instruments.nanhunt.causes.tensor_names import name_nearby
from torchdebug_magics.instruments.nanhunt.replay.bad_step import Inquiry, Outcome
from torchdebug_magics.instruments.nanhunt.replay.conclusion import bare
from torchdebug_magics.instruments.nanhunt.replay.investigate import Investigator
from torchdebug_magics.instruments.nanhunt.report import Sink
from torchdebug_magics.instruments.nanhunt.rerun.attempt import frame_chain
from torchdebug_magics.instruments.nanhunt.rerun.buffers import base_of, end_deferred
from torchdebug_magics.instruments.nanhunt.rerun.step import Entry
from torchdebug_magics.instruments.nanhunt.rerun.step_recorder import StepRecorder
from torchdebug_magics.instruments.nanhunt.watch import update_checks as updates
from torchdebug_magics.instruments.nanhunt.watch.computing_cells import Computed
from torchdebug_magics.instruments.nanhunt.watch.findings_tally import Tally
from torchdebug_magics.instruments.nanhunt.watch.scaler_overflows import Overflows, skips
from torchdebug_magics.instruments.nanhunt.watch.sentinel import Beginning, Leaves, site, survey
from torchdebug_magics.instruments.nanhunt.watch.update_checks import Undos
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.where import user_frame
from torchdebug_magics.probing.tensors import kind_of, largest, tensors_in

_CONTEXT_HISTORY = 100
_HARMLESS_ENOUGH = 3


class Checks:
    """Each check returns an outcome that is new, or None."""

    def __init__(
        self, tally: Tally, recorder: StepRecorder, investigator: Investigator, guard: Guard, *, stops: bool, layers: bool
    ) -> None:
        self._tally = tally
        self._recorder = recorder
        self._investigator = investigator
        self._guard = guard
        self._stops = stops
        self._want_layers = layers
        self._leaves = Leaves()
        self._overflows = Overflows()
        self._versions: dict[int, int] = {}
        self._last_loss: tuple[torch.Tensor, ...] = ()
        self._unchecked: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._updated: set[int] = set()
        self._spoiling: tuple[torch.optim.Optimizer, bool] | None = None
        """What was judged of the update that runs now; not of one that calls a closure, which may have changed what it was judged by."""
        self._undos = Undos()
        self._computed: Computed | None = None
        self._beginning = Beginning()
        self.output = ModelOutputs(tally, recorder, investigator, guard, self._context).look
        self.is_half_updated = False
        """Whether the backward() that runs now has seen an update."""
        self._explained: set[int] = set()
        """Ids of the gradients that were bad after the last backward() and have been looked into."""
        self._were_bad = False
        """Whether there were bad gradients before the backward() that runs now."""

    def before_backward(self) -> None:
        """Only after bad gradients: are they still there? Then what follows adds to them, and is the same step where a scaler skips it."""
        were_bad = not math.isfinite(self._tally.last_peak)
        entered = self._recorder.entered() if were_bad or self._overflows.run else []
        self._overflows.look_before(entered)
        self._were_bad = were_bad and updates.hold_bad_gradients(entered)

    def backward(self, tensors: tuple[torch.Tensor, ...], result: Any, *, keeps: bool) -> Outcome | None:
        """One reduction over the loss and all gradients, right after they were computed."""
        step = self._recorder.step
        step.backwards += 1
        self.is_half_updated = False
        self._note_going_on()
        self._undos.saw(step.buffers)
        leaves = self._leaves.of(site(), tensors, self._recorder.parameters())
        results = [base_of(one) for one in result if isinstance(one, torch.Tensor)] if isinstance(result, (tuple, list)) else []
        gradients = [gradient for leaf in leaves.values() if (gradient := leaf.grad) is not None]
        loss, peak = survey(tensors, [*gradients, *results])
        self._tally.checked(loss, peak)
        self._versions = {id(gradient): gradient._version for gradient in gradients}
        self._last_loss = tensors if len(tensors) == 1 and tensors[0].numel() == 1 else ()
        outcome = None
        self._explained.clear()
        if not math.isfinite(peak):
            outcome = self._investigate(tensors, leaves)
            if outcome is not None:
                self._explained.update(id(gradient) for gradient in gradients if kind_of(gradient))
        else:
            self._overflows.run = 0
            self._look(tensors, leaves)
        self._tally.backwards += 1
        self._recorder.settle(self._tally.backwards)
        step.closed = step.closed or not keeps
        self._recorder.mark()
        if outcome is not None and self._stops:
            self._undo(leaves)
        return outcome

    def gradients(
        self, optimizer: torch.optim.Optimizer, differentiated: tuple[torch.Tensor, ...] = (), inside: FrameType | None = None
    ) -> Outcome | None:
        """Gradients that were written since the last backward(), before an update applies them.

        In the middle of a backward pass: what that began from, and the frame that it runs in.
        """
        held = updates.gradients_of(optimizer)
        if any(id(gradient) in self._explained for _, gradient in held):
            return None  # clipping, or an average over ranks, only spreads what the last backward() left
        overflowed = bool(self._overflows.run)
        unseen = overflowed or (updates.averages_by_hand(self._recorder.entered()) and math.isfinite(self._tally.last_peak))
        changed = [gradient for _, gradient in held if unseen or self._versions.get(id(gradient)) != gradient._version]
        if not changed or self._tally.is_full or math.isfinite(survey((), changed)[1]) or skips(optimizer):
            return None
        leaves = {**(self._recorder.parameters() if inside is not None else {}), **{id(one): one for one, _ in held}}
        inquiry = Inquiry(differentiated or self._last_loss, leaves, frame_chain(inside or sys._getframe(1)), self._context())
        with end_deferred():
            outcome = self._guard.run(
                "the replay up to the update", self._investigator.update, self._recorder.step, inquiry, inside=inside is not None
            )
        if outcome is None:
            parameter, gradient = next((pair for pair in held if kind_of(pair[1])), held[0])
            finding = updates.bad_gradient(
                self._name(parameter), gradient, self._context(), overflowed=overflowed, computed=id(gradient) in self._versions
            )
            outcome = Outcome(finding, {"gradient": gradient.detach()})
        if inside is not None and self.is_half_updated and outcome.finding is not None:
            outcome = replace(outcome, finding=replace(outcome.finding, weights="weights changed since the step began"))
        if overflowed:
            self._overflows.applied()
            self._tally.overflows = self._overflows.total
        return self._tally.add(outcome)

    def before_update(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Copies what an update may spoil."""
        self._spoiling = None
        if self._tally.is_full:
            return
        may_spoil = self._may_spoil(optimizer)
        if not closure:
            self._spoiling = optimizer, may_spoil
        if may_spoil or (closure and updates.calls_again(optimizer)):
            self._undos.begin(optimizer, self._recorder.step.buffers, copies=self._stops)

    def _may_spoil(self, optimizer: torch.optim.Optimizer) -> bool:
        """The first update of each optimizer, and those with a risk of their own."""
        return id(optimizer) not in self._updated or updates.is_risky(optimizer, self._tally.last_peak)

    def parameters(self, optimizer: torch.optim.Optimizer) -> Outcome | None:
        """Parameters after an update that may have gone wrong: any other shows in the next loss, or at the end of the cell."""
        self._last_loss = ()  # with its graph, where that was retained
        self._note_going_on()
        told, self._spoiling = self._spoiling, None
        risky = told[1] if told is not None and told[0] is optimizer else self._may_spoil(optimizer)
        self._updated.add(id(optimizer))
        try:
            if risky:
                return self._look_at_parameters(optimizer)
            self._unchecked = weakref.ref(optimizer)
        finally:
            self._undos.end(optimizer)
            self._recorder.mark()
        return None

    def begin(self, modules: list[torch.nn.Module]) -> None:
        """Remember where the user's statements begin, and which of the `modules` that are alive are bad already."""
        self._beginning = self._guard.run("the check of the weights before the cell", Beginning.take, modules) or Beginning()
        self._computed = Computed(frame) if (frame := user_frame(sys._getframe(1))) is not None else None

    def finish(self) -> None:
        """The last update of the cell has no next loss to show in. Records, and raises nothing."""
        computed, self._computed = self._computed, None
        if computed is not None and not (self._tally.backwards or self._tally.steps or self._tally.raised or self._tally.has_findings):
            inquiry = Inquiry((), {}, (), replace(self._context(), sink=Sink("output")))
            outcome = self._guard.run("the check of the values that the cell computed", self._investigator.computation, computed, inquiry)
            if outcome is not None and outcome.finding is not None:
                self._tally.add(outcome)
        optimizer = self._unchecked()
        if optimizer is not None:
            self._guard.run("the check of the last update", self._look_at_parameters, optimizer)

    def _look_at_parameters(self, optimizer: torch.optim.Optimizer) -> Outcome | None:
        held = updates.parameters_of(optimizer)
        if not held or self._tally.is_full or self._tally.has_findings:
            return None
        parameter = updates.first_bad([one for one in held if id(one) not in self._recorder.models.bad_from_start()])
        if parameter is None:
            return None
        undo = self._undos.outermost()
        before = undo.before if undo is not None and undo.optimizer is optimizer else updates.nothing_known
        finding = updates.bad_parameter(optimizer, parameter, self._name(parameter), self._context(), before)
        bad = Outcome(finding, {"output": parameter.detach().clone()})
        outcome = self._tally.add(bad if undo is None else undo.weighed(bad, "weights poisoned"))
        if outcome is not None and self._stops and undo is not None:
            self._undo({})
        return outcome

    def _investigate(self, tensors: tuple[torch.Tensor, ...], leaves: dict[int, torch.Tensor]) -> Outcome | None:
        if self._tally.is_full:
            return None
        context = self._context()
        self._tally.phase = f"replaying step {context.step}"
        inquiry = Inquiry(tensors, leaves, frame_chain(sys._getframe(1)), context, only_adds=self._were_bad)
        try:
            with end_deferred():
                outcome = self._investigator.sink(self._recorder.step, inquiry)
        except (KeyboardInterrupt, SystemExit):
            self._guard.note(f"step {context.step} is non-finite; its investigation was interrupted, so the cause was not traced")
            self._tally.add(bare(inquiry))
            raise
        finally:
            self._tally.phase = "watching"
        if outcome.overflow is None:
            undo = self._undos.outermost()
            return self._tally.add(outcome if undo is None else undo.told(outcome, context, self._name))
        collapse = self._overflows.count(leaves, outcome.overflow, context)
        self._tally.overflows = self._overflows.total
        return None if collapse is None else self._tally.add(Outcome(collapse, {}))

    def _look(self, tensors: tuple[torch.Tensor, ...], leaves: dict[int, torch.Tensor]) -> None:
        """With ``--layers``: the table of a healthy step, taken at steps 0, 1, 3, 7, ... as each costs a replay."""
        if self._want_layers and not self._tally.backwards & (self._tally.backwards + 1):
            inquiry = Inquiry(tensors, leaves, frame_chain(sys._getframe(1)), self._context())
            self._tally.show_layers(self._guard.run("the layer table", self._investigator.look, self._recorder.step, inquiry) or ())

    def _note_going_on(self) -> None:
        """An `except` of the user's may catch the error. Then the run is theirs, and as it would be without us; the finding stands."""
        if self._stops and self._tally.has_findings:
            self._guard.note("the error was caught and the cell continued: later bad steps were neither investigated nor stopped")

    def _undo(self, leaves: dict[int, torch.Tensor]) -> None:
        """The cell stops here: all as it was before the bad step, and no bad gradient left to be applied."""
        for buffers in self._recorder.step.buffers:
            buffers.put_back()
        undo = self._undos.outermost()
        if undo is not None:
            undo.put_back()
        for leaf in leaves.values():
            leaf.grad = None
        self._recorder.step.clear()

    def _context(self) -> Context:
        return Context(
            step=self._tally.steps,
            backward=self._tally.backwards,
            roots=tuple(self._recorder.roots()),
            entries=tuple(self._recorder.step.entries),
            history=tuple(self._tally.history)[-_CONTEXT_HISTORY:],
            losses=tuple(self._tally.losses)[-_CONTEXT_HISTORY:],
            bad_from_start=self._recorder.models.bad_from_start(),
            beginning=self._beginning,
        )

    def _name(self, parameter: torch.Tensor) -> str:
        names = (name for root in self._recorder.roots() for name, one in root.named_parameters() if one is parameter)
        return next(names, None) or name_nearby(parameter, sys._getframe(1))


class ModelOutputs:
    """Looks at the output of each outermost module call, and learns which modules return infinities on purpose."""

    def __init__(
        self, tally: Tally, recorder: StepRecorder, investigator: Investigator, guard: Guard, context: Callable[[], Context]
    ) -> None:
        self._tally = tally
        self._recorder = recorder
        self._investigator = investigator
        self._guard = guard
        self._context = context
        self._harmless: dict[int, int] = {}

    def look(self, entry: Entry, output: Any, *, inside: bool) -> Outcome | None:
        """The outcome, where it is new."""
        step, tensors = self._recorder.step, list(tensors_in(output))
        if inside or any(tensor.requires_grad for tensor in tensors):
            step.grows_graph = True
            return None
        self._tally.forwards += 1
        outcome = None
        if not self._tally.is_full and not math.isfinite(largest(tensors)) and not self._is_harmless(entry):
            outcome = self._tally.add(self._investigator.output(step, entry, tensors, self._context()))
            self._tally.meant += outcome is None
        if not step.grows_graph:
            step.clear()
        return outcome

    def _is_harmless(self, entry: Entry) -> bool:
        """Whether this module's bad outputs were looked into and found to be meant, three times over."""
        count = self._harmless.get(id(entry.module), 0)
        self._harmless[id(entry.module)] = count + 1
        if count == _HARMLESS_ENOUGH:
            self._guard.note("a model returns intentional infinities (such as a mask): its outputs are no longer checked")
        return count >= _HARMLESS_ENOUGH
