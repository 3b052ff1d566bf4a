"""What is looked at, and when: at each backward(), around each update, at the output of each model that runs without gradients."""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchdebug_magics.instruments.nanhunt.causes.evidence import Context
from torchdebug_magics.instruments.nanhunt.causes.tensor_names import name_in_a_model, parameter_name
from torchdebug_magics.instruments.nanhunt.replay.conclusion import Inquiry, Outcome, bare
from torchdebug_magics.instruments.nanhunt.replay.investigate import Computed, Investigator
from torchdebug_magics.instruments.nanhunt.report import LayerRow, LiveNan, NanFinding, NanReport, Sink, headline, sentence
from torchdebug_magics.instruments.nanhunt.rerun.attempt import base_of, end_deferred, frame_chain
from torchdebug_magics.instruments.nanhunt.rerun.step_recorder import Entry, StepRecorder
from torchdebug_magics.instruments.nanhunt.watch import update_checks as updates
from torchdebug_magics.instruments.nanhunt.watch.sentinel import Beginning, Leaves, site, survey
from torchdebug_magics.instruments.nanhunt.watch.update_checks import Overflows, Undo, skips
from torchdebug_magics.probing.distributed.this_rank import world_size
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import user_frame
from torchdebug_magics.probing.tensors import kind_of, largest, tensors_in

_CONTEXT_HISTORY = 100
_HARMLESS_ENOUGH = 3
_MOST_HISTORY = 10_000
_LIVE_HISTORY = 60


class Tally:
    """Counts, history and findings; frozen into a report at the end, copied into a snapshot for the live view."""

    def __init__(self, most_findings: int) -> None:
        self.steps = self.backwards = self.forwards = self.meant = 0
        self.overflows = Overflows()
        self.history: deque[float] = deque(maxlen=_MOST_HISTORY)
        self.losses: deque[float] = deque(maxlen=_MOST_HISTORY)
        self.first = Outcome(None, {})
        """What came of the first look that found something."""
        self.phase = "watching"
        self.raised = ""
        self._most = most_findings
        self._findings: list[NanFinding] = []
        self._taken = 0
        """Findings with those that are the same as an earlier one: each of them costs a replay."""
        self._poisoned = False
        self._layers: tuple[LayerRow, ...] = ()
        self._layers_step: int | None = None
        self._started_s = time.perf_counter()

    @property
    def is_full(self) -> bool:
        """Whether there is nothing more to find: enough was found, or an earlier finding has poisoned the weights."""
        return self._poisoned or self._taken >= self._most

    @property
    def last_peak(self) -> float:
        """The largest magnitude at the last backward(); infinite before the first one, of which nothing is known."""
        return next(reversed(self.history), math.inf)

    def show_layers(self, rows: tuple[LayerRow, ...]) -> None:
        """The layer table of the present step."""
        if rows:
            self._layers, self._layers_step = rows, self.steps

    def add(self, outcome: Outcome) -> Outcome | None:
        """Take a finding in, unless it follows from an earlier one; the outcome if it was taken."""
        finding = outcome.finding
        if finding is None:
            return None
        if self._findings and finding.phase in {"parameter", "optimizer"}:
            self._poisoned = True
            return None
        if not self._findings:
            self.first = outcome
            self.show_layers(outcome.layers)
        self._taken += 1
        for at, known in enumerate(self._findings):
            if _same(known, finding):
                self._findings[at] = replace(known, again=(*known.again, finding.step))
                return outcome
        self._findings.append(finding)
        return outcome

    def _as_left(self, finding: NanFinding) -> NanFinding:
        """A finding with the state of the weights at the end: where the cell went on, it may have updated them."""
        if finding.weights != "weights untouched" or self.steps <= finding.step:
            return finding
        return replace(finding, weights="weights poisoned" if self._poisoned else "weights updated since")

    def report(self, problems: list[str]) -> NanReport:
        """Everything, frozen."""
        if self._poisoned:
            problems = [*problems, "the weights are non-finite since the last finding: later steps were not investigated"]
        findings = tuple(map(self._as_left, self._findings))
        report = NanReport(
            problems=tuple(problems),
            findings=findings,
            steps_count=self.steps,
            backward_count=self.backwards,
            forward_count=self.forwards,
            meant_count=self.meant,
            overflow_steps_count=self.overflows.total,
            history=tuple(self.history),
            losses=tuple(self.losses),
            layers=self._layers,
            layers_step=self._layers_step,
            reproduced=self.first.reproduced,
            raised="" if self._findings else self.raised,
            replay=self.first.way,
        )
        return replace(report, sentence=sentence(report), headline=headline(report))

    def live(self) -> LiveNan:
        """For the live view; any thread may ask."""
        elapsed_s = time.perf_counter() - self._started_s
        losses, history = self.losses, self.history
        return LiveNan(
            steps_count=self.steps,
            backward_count=self.backwards,
            overflow_steps_count=self.overflows.total,
            loss=losses[-1] if losses else None,
            history=tuple(history[place] for place in range(-min(len(history), _LIVE_HISTORY), 0)),
            steps_per_s=self.backwards / elapsed_s if self.backwards and elapsed_s > 0 else None,
            phase=self.phase,
        )


def _same(one: NanFinding, other: NanFinding) -> bool:
    """Whether two findings of different steps differ in nothing that a user would change."""
    return all(getattr(one, name) == getattr(other, name) for name in ("phase", "kind", "op", "module", "location", "tensor", "diagnosis"))


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
        self._versions: dict[int, int] = {}
        self._last_loss: tuple[torch.Tensor, ...] = ()
        self._unchecked: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._updated: set[int] = set()
        self._begun: Undo | None = None
        self._computed: Computed | None = None
        self._beginning = Beginning()
        self._harmless: dict[int, int] = {}
        """How often the bad outputs of a module, by its id, were looked into."""
        self.is_half_updated = False
        """Whether the backward() that runs now has seen an update."""
        self._explained: set[int] = set()
        """Ids of the gradients that were bad after the last backward() and have been looked into."""
        self._were_bad = False
        """Whether there were bad gradients before the backward() that runs now."""

    def before_backward(self) -> None:
        """Only after bad gradients: are they still there? Then what follows adds to them, and is the same step where a scaler skips it."""
        were_bad = not math.isfinite(self._tally.last_peak)
        entered = self._recorder.models.entered() if were_bad or self._tally.overflows.run else []
        self._tally.overflows.look_before(entered)
        gradients = (parameter.grad for model in entered for parameter in model.parameters() if parameter.grad is not None)
        self._were_bad = were_bad and not math.isfinite(largest(gradients))

    def backward(self, tensors: tuple[torch.Tensor, ...], result: Any, *, keeps: bool) -> Outcome | None:
        """One reduction over the loss and all gradients, right after they were computed."""
        step = self._recorder.step
        step.backwards += 1
        self.is_half_updated = False
        self._note_going_on()
        if (undo := self._update()) is not None:
            undo.buffers = undo.buffers or tuple(step.buffers)
        leaves = self._leaves.of(site(), tensors, self._recorder.parameters())
        results = [base_of(one) for one in result if isinstance(one, torch.Tensor)] if isinstance(result, (tuple, list)) else []
        gradients = [gradient for leaf in leaves.values() if (gradient := leaf.grad) is not None]
        loss, peak = survey(tensors, [*gradients, *results])
        self._tally.losses.append(loss)
        self._tally.history.append(peak)
        self._versions = {id(gradient): gradient._version for gradient in gradients}
        self._last_loss = tensors if len(tensors) == 1 and tensors[0].numel() == 1 else ()
        outcome = None
        self._explained.clear()
        if not math.isfinite(peak):
            outcome = self._investigate(tensors, leaves)
            if outcome is not None:
                self._explained.update(id(gradient) for gradient in gradients if kind_of(gradient))
        else:
            self._tally.overflows.run = 0
            self._look(tensors, leaves)
        self._tally.backwards += 1
        self._recorder.settle(self._tally.backwards)
        step.closed = step.closed or not keeps
        self._recorder.mark()
        if outcome is not None and self._stops:
            self._undo(leaves)
        return outcome

    def gradients(self, optimizer: torch.optim.Optimizer, *, inside: bool) -> Outcome | None:
        """Gradients that were written since the last backward(), before an update applies them; `inside` a backward() without a replay."""
        gradients = updates.gradients_of(optimizer)
        if any(id(gradient) in self._explained for _, gradient in gradients):
            return None  # clipping, or an average over ranks, only spreads what the last backward() left
        overflowed = bool(self._tally.overflows.run)
        # Collectives of the user's may have written the gradients: a tensor's version tells nothing of them.
        by_hand = world_size() > 1 and not any(isinstance(model, DistributedDataParallel) for model in self._recorder.models.entered())
        unseen = overflowed or (by_hand and math.isfinite(self._tally.last_peak))
        changed = [gradient for _, gradient in gradients if unseen or self._versions.get(id(gradient)) != gradient._version]
        if not changed or self._tally.is_full or math.isfinite(survey((), changed)[1]) or skips(optimizer):
            return None
        outcome: Outcome | None = None
        if not inside:
            leaves = {id(parameter): parameter for parameter, _ in gradients}
            inquiry = Inquiry(self._last_loss, leaves, frame_chain(sys._getframe(1)), self._context())
            with end_deferred():
                outcome = self._guard.run("the replay up to the update", self._investigator.update, self._recorder.step, inquiry)
        if outcome is None:
            parameter, gradient = next((pair for pair in gradients if kind_of(pair[1])), gradients[0])
            made = "hook" if inside else "scaled" if overflowed else "changed" if id(gradient) in self._versions else "elsewhere"
            finding = updates.bad_gradient(self._name(parameter), gradient, self._context(), made)
            if inside and self.is_half_updated:
                finding = replace(finding, weights="weights changed since the step began")
            outcome = Outcome(finding, {"gradient": gradient.detach()})
        if overflowed:
            self._tally.overflows.applied()
        return self._tally.add(outcome)

    def output(self, entry: Entry, output: Any, *, inside: bool) -> Outcome | None:
        """The output of an outermost module call; learns which modules return infinities on purpose."""
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

    def before_update(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Copies what an update may spoil."""
        if not self._tally.is_full and (self._may_spoil(optimizer) or (closure and updates.calls_again(optimizer))):
            self._begun = self._update() or updates.Undo(optimizer, self._recorder.step.buffers, copies=self._stops)

    def _update(self) -> Undo | None:
        """The outermost update that is running now, if a copy was worth while."""
        self._begun = self._begun if self._begun is not None and self._begun.is_running() else None
        return self._begun

    def _may_spoil(self, optimizer: torch.optim.Optimizer) -> bool:
        """The first update of each optimizer, and those with a risk of their own."""
        return id(optimizer) not in self._updated or updates.is_risky(optimizer, self._tally.last_peak)

    def parameters(self, optimizer: torch.optim.Optimizer) -> Outcome | None:
        """Parameters after an update that may have gone wrong: any other shows in the next loss, or at the end of the cell."""
        self._last_loss = ()  # with its graph, where that was retained
        self._note_going_on()
        risky = self._may_spoil(optimizer)
        self._updated.add(id(optimizer))
        try:
            if risky:
                return self._look_at_parameters(optimizer)
            self._unchecked = weakref.ref(optimizer)
        finally:
            if self._begun is not None and self._begun.optimizer is optimizer:
                self._begun = None
            self._recorder.mark()
        return None

    def begin(self, modules: list[torch.nn.Module]) -> None:
        """Remember where the user's statements begin, and which of the `modules` that are alive are bad already."""
        self._beginning = self._guard.run("the check of the weights before the cell", Beginning.take, modules) or Beginning()
        self._computed = Computed(frame) if (frame := user_frame(sys._getframe(1))) is not None else None

    def finish(self) -> None:
        """The last update of the cell has no next loss to show in. Records, and raises nothing."""
        computed, self._computed = self._computed, None
        if computed is not None and not (self._tally.backwards or self._tally.steps or self._tally.raised or self._tally.first.finding):
            inquiry = Inquiry((), {}, (), replace(self._context(), sink=Sink("output")))
            outcome = self._guard.run("the check of the values that the cell computed", self._investigator.computation, computed, inquiry)
            if outcome is not None and outcome.finding is not None:
                self._tally.add(outcome)
        optimizer = self._unchecked()
        if optimizer is not None:
            self._guard.run("the check of the last update", self._look_at_parameters, optimizer)

    def _look_at_parameters(self, optimizer: torch.optim.Optimizer) -> Outcome | None:
        parameters = [parameter for parameter, _ in updates.gradients_of(optimizer)]
        if not parameters or self._tally.is_full or self._tally.first.finding:
            return None
        parameters = [parameter for parameter in parameters if not self._beginning.was_bad(parameter)]
        # With one synchronisation, where all are finite.
        parameter = None if math.isfinite(survey((), parameters)[1]) else next(filter(kind_of, parameters), None)
        if parameter is None:
            return None
        undo = self._update()
        finding = updates.bad_parameter(optimizer, parameter, self._name(parameter), self._context())
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
            undo = self._update()
            if undo is not None and outcome.finding is not None and outcome.finding.phase in {"parameter", "optimizer"}:
                return self._look_at_parameters(undo.optimizer) or self._tally.add(undo.told(outcome))
            return self._tally.add(outcome if undo is None else undo.told(outcome))
        collapse = self._tally.overflows.count(leaves, outcome.overflow, context)
        return None if collapse is None else self._tally.add(Outcome(collapse, {}))

    def _look(self, tensors: tuple[torch.Tensor, ...], leaves: dict[int, torch.Tensor]) -> None:
        """With ``--layers``: the table of a healthy step, taken at steps 0, 1, 3, 7, ... as each costs a replay."""
        if self._want_layers and not self._tally.backwards & (self._tally.backwards + 1):
            inquiry = Inquiry(tensors, leaves, frame_chain(sys._getframe(1)), self._context())
            self._tally.show_layers(self._guard.run("the layer table", self._investigator.look, self._recorder.step, inquiry) or ())

    def _note_going_on(self) -> None:
        """An `except` of the user's may catch the error. Then the run is theirs, and as it would be without us; the finding stands."""
        if self._stops and self._tally.first.finding:
            self._guard.note("the error was caught and the cell continued: later bad steps were neither investigated nor stopped")

    def _undo(self, leaves: dict[int, torch.Tensor]) -> None:
        """The cell stops here: all as it was before the bad step, and no bad gradient left to be applied."""
        for buffer in self._recorder.step.buffers:
            buffer.put_back()
        if (undo := self._update()) is not None:
            undo.put_back()
        for leaf in leaves.values():
            leaf.grad = None
        self._recorder.step.clear()

    def _context(self) -> Context:
        return Context(
            step=self._tally.steps,
            backward=self._tally.backwards,
            roots=tuple(self._recorder.models.roots()),
            entries=tuple(self._recorder.step.entries),
            history=tuple(self._tally.history)[-_CONTEXT_HISTORY:],
            losses=tuple(self._tally.losses)[-_CONTEXT_HISTORY:],
            beginning=self._beginning,
        )

    def _name(self, parameter: torch.Tensor) -> str:
        name = parameter_name(parameter, self._recorder.models.roots())
        return name or variable_of(parameter) or name_in_a_model(parameter) or "a parameter"
