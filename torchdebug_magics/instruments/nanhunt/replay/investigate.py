"""The ways to look into a bad step, in one order: where one is closed, the next best, and a word about it."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch.utils.data import Dataset

from torchdebug_magics.instruments.nanhunt.causes.evidence import Context, Evidence
from torchdebug_magics.instruments.nanhunt.replay.conclusion import (
    Inquiry,
    Outcome,
    Sinks,
    averaged,
    bad_outputs,
    bare,
    born_beside,
    conclude,
    needs_others,
    same_gradients,
    sinks_of,
    variables_of,
    why_not_reproduced,
)
from torchdebug_magics.instruments.nanhunt.replay.data_sets import made_by_a_data_set
from torchdebug_magics.instruments.nanhunt.report import LayerRow, Sink
from torchdebug_magics.instruments.nanhunt.rerun.attempt import Attempt, CannotReplay, Replayed, names_seen, refuse, span_at
from torchdebug_magics.instruments.nanhunt.rerun.step_recorder import Entry, Step
from torchdebug_magics.instruments.nanhunt.rerun.step_rerun import StepRerun
from torchdebug_magics.instruments.nanhunt.rerun.step_slice import Slice, draws, overwritten, runnable
from torchdebug_magics.instruments.nanhunt.verified_fix import Again, with_verified_fix
from torchdebug_magics.instruments.nanhunt.watch.update_checks import at_scale_one, live_scalers, may_be_scaling
from torchdebug_magics.probing.source import syntax
from torchdebug_magics.probing.tensors import NAN, kind_of, tensors_in

_MOST_S = 10.0
"""A cell that took longer is not run again."""
_EXPECTING = frozenset({"isnan", "isfinite", "nan_to_num", "nan_to_num_", "nanmean", "nansum", "nanmedian", "nanquantile", "equal_nan"})
_LOOKED_INTO = frozenset({torch.Tensor, tuple, list, dict})
Bad: TypeAlias = "Callable[[Replayed], Sinks]"
"""What of a replay is bad."""


class Computed:
    """The statements of the user's under the magic, or inside the `with`."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._where = span_at((frame.f_code, frame.f_lasti))
        self._began_s = time.perf_counter()

    def bad(self) -> tuple[str, ...]:
        """Variables bound here that hold a NaN nobody in the cell reckons with; none where it took too long to be run again."""
        statements = self._statements()
        if time.perf_counter() - self._began_s > _MOST_S or not statements:
            return ()
        # What is asked whether it is NaN, or given to what leaves NaN out.
        expected = syntax.names_in(*(call for call in syntax.nodes(ast.Call, *statements) if syntax.method(call) in _EXPECTING))
        names = names_seen(self._frame)
        bound = (name for name in sorted(syntax.bound_names(*statements) - expected) if not name.startswith("_"))
        return tuple(name for name in bound if any(kind_of(tensor) & NAN for tensor in self.results_in(names.get(name))))

    @staticmethod
    def results_in(value: Any) -> Iterator[torch.Tensor]:
        """The tensors of a variable, or of an object of the user's own class, such as a metric that adds up what it is told."""
        if type(value) in _LOOKED_INTO:
            yield from tensors_in(value)
        elif type(value).__module__ == "__main__" and not isinstance(value, (torch.nn.Module, Dataset)):
            yield from tensors_in([held for held in getattr(value, "__dict__", {}).values() if type(held) in _LOOKED_INTO])

    def slice(self, wanted: tuple[str, ...]) -> Slice:
        """What made these variables; refused where it takes from an iterator, or reads what is not there any more."""
        names = names_seen(self._frame)
        objects = {name for name in wanted if type(names[name]) not in _LOOKED_INTO}

        def is_maker(statement: ast.stmt, needed: set[str]) -> bool:
            """Also where it calls a method of an object for what that does, as ``metric.add_batch(scores)``."""
            calls = (node.value for node in syntax.nodes(ast.Expr, statement) if isinstance(node.value, ast.Call))
            return syntax.makes(statement, needed) or any(syntax.root_of(call) in objects for call in calls)

        kept, lost = syntax.backward_slice(self._statements(), set(wanted), is_maker=is_maker)
        if lost or not kept or any(map(draws, kept)):
            refuse("the inputs of the variables no longer exist")
        code, given = runnable(kept, self._frame, 0, names, wanted)
        return Slice(code, {**names, **given}, tuple(kept), {name: names[name] for name in wanted})

    def _statements(self) -> list[ast.stmt]:
        lists = syntax.lists_around(syntax.tree_of(self._frame.f_code.co_filename), self._where)
        if not lists:
            return []
        body, place = lists[0]
        opened = body[place]
        return opened.body if isinstance(opened, (ast.With, ast.AsyncWith)) else body[place + 1 :]


class Investigator:
    """Looks into one bad step."""

    def __init__(self, rerun: StepRerun, note: Callable[[str], None]) -> None:
        self._rerun = rerun
        self._note = note

    def sink(self, step: Step, inquiry: Inquiry) -> Outcome:
        """A backward (or grad) call whose loss or gradients are bad."""
        attempt = Attempt(inquiry.tensors, step.backward_number, inquiry.leaves)
        if (scalers := self._overflows(step, inquiry, attempt)) is not None:
            return Outcome(None, {}, overflow=scalers)
        problems: list[str] = []
        for look in (self._whole, self._inside, self._models):
            outcome = look(step, inquiry, attempt)
            if isinstance(outcome, str):
                problems.append(outcome)
                continue
            if look != self._inside:  # what was run again there is all of the step that counts
                list(map(self._note, filter(None, problems)))
            return outcome
        list(map(self._note, filter(None, problems)))
        return bare(inquiry)

    def _whole(self, step: Step, inquiry: Inquiry, attempt: Attempt) -> Outcome | str:
        """The step's statements, run again; why not, or nothing where it depends on what other ranks send."""
        again: Again = partial(self._rerun.statements, step, inquiry.chain, attempt)
        replayed = again()
        if replayed.refused:
            return f"the step could not be replayed as a whole: {replayed.refused}"
        if not replayed.finished:
            return replayed.problem or "the replay did not reach backward()"
        if replayed.reproduced is False:
            # What made a tensor with a graph before the step may have drawn random numbers: then that tensor is taken as it is.
            without = Attempt(inquiry.tensors, step.backward_number, dict(inquiry.leaves))
            fewer: Again = partial(self._rerun.statements, step, inquiry.chain, without, graphs=False)
            other = fewer()
            replayed, again = (other, fewer) if other.finished and other.reproduced else (replayed, again)
        return self._judged(step, inquiry, attempt, replayed, again)

    def _inside(self, step: Step, inquiry: Inquiry, attempt: Attempt) -> Outcome | str:
        """The function that calls backward(), alone: what ran before it (an episode, say) need not be a part of the loss."""
        inner = step.inside(inquiry.chain)
        if inner is None:
            return ""
        again: Again = partial(self._rerun.statements, inner, inquiry.chain, Attempt(inquiry.tensors, 1, inquiry.leaves))
        replayed = again()
        return self._judged(step, inquiry, attempt, replayed, again) if replayed.finished and replayed.reproduced else ""

    def _models(self, step: Step, inquiry: Inquiry, attempt: Attempt) -> Outcome | str:
        """Only the model calls again; why not, or nothing where their outputs are not bad."""
        replayed = self._rerun.modules(step, Attempt(attempt.original, 0, attempt.leaves))
        if replayed.refused:
            return f"the model call could not be replayed: {replayed.refused}"
        replayed = replace(replayed, reproduced=None, names=variables_of(inquiry.chain))
        bad = bad_outputs(replayed)
        return replace(conclude(inquiry, replayed, bad, "module", self._note), evidence=None) if bad else ""

    def _judged(self, step: Step, inquiry: Inquiry, attempt: Attempt, replayed: Replayed, again: Again) -> Outcome | str:
        if (found := averaged(inquiry, replayed)) is not None:
            return found
        replayed.reproduced = replayed.reproduced and (bool(replayed.averaging) or same_gradients(replayed, inquiry))
        if needs_others(replayed) or replayed.reproduced is False:
            self._note(why_not_reproduced(replayed))
        if needs_others(replayed):
            return ""
        bad: Bad = partial(sinks_of, inquiry=inquiry)
        outcome = conclude(inquiry, replayed, bad(replayed), "statements", self._note)
        earlier = self._before_the_model(step, inquiry, attempt, outcome)
        outcome, again = (outcome, again) if earlier is None else earlier
        if earlier is None and (beside := born_beside(replayed, outcome)):
            # What an earlier step has left may be made bad again in this one, though its loss does not use that yet.
            again_born = conclude(inquiry, replayed, beside, outcome.way, lambda _: None)
            if again_born.finding is not None and again_born.finding.op is not None:
                return self._with_fix(again_born, inquiry, again, partial(born_beside, outcome=outcome), what="the bad op")
        if outcome.finding is not None and outcome.finding.phase == "data":
            outcome, reading = made_by_a_data_set(self._rerun, inquiry, outcome, outcome.finding)
            if reading is not None:
                return self._with_fix(outcome, inquiry, reading, bad_outputs, only_births=True, what="the bad sample")
        return self._with_fix(outcome, inquiry, again, bad)

    def _with_fix(
        self, outcome: Outcome, inquiry: Inquiry, again: Again, bad: Bad, *, only_births: bool = False, what: str = "the bad step"
    ) -> Outcome:
        """With code for its fix, where some was found that ends the fault."""
        finding, evidence = outcome.finding, outcome.evidence
        outcome = replace(outcome, evidence=None)
        if finding is None or evidence is None or evidence.op is None or outcome.reproduced is False:
            return outcome

        def behind(replayed: Replayed) -> Evidence | None:
            sinks = bad(replayed)
            if not sinks:
                return None
            found = conclude(inquiry, replayed, sinks, outcome.way, lambda _: None, only_births=only_births)
            return None if only_births and found.finding is None else found.evidence or evidence

        return replace(outcome, finding=with_verified_fix(finding, evidence, again, behind, what))

    def _before_the_model(self, step: Step, inquiry: Inquiry, attempt: Attempt, outcome: Outcome) -> tuple[Outcome, Again] | None:
        """Data that were made bad between the start of the step and the model call were not bad data: look at what made them."""
        finding = outcome.finding
        name = finding.tensor.partition("[")[0] if finding is not None and finding.phase == "data" and finding.tensor else ""
        if finding is None or not name.isidentifier() or not step.entries:
            return None
        try:
            given = overwritten(step, inquiry.chain, name, self._rerun.recorder.batches)
        except CannotReplay:
            return None
        for held in ({}, *given):
            again: Again = partial(self._rerun.statements, step, inquiry.chain, attempt, name, held)
            replayed = again()
            if replayed.refused:
                return None
            if replayed.finished and replayed.reproduced:
                made = conclude(inquiry, replayed, sinks_of(replayed, inquiry), outcome.way, self._note)
                if made.finding is not None and made.finding.op is not None:
                    return made, again
        return None

    def update(self, step: Step, inquiry: Inquiry) -> Outcome | None:
        """Gradients that are bad when an optimizer steps; None where that cannot be run again."""
        attempt = Attempt(inquiry.tensors, step.backward_number, inquiry.leaves, until_update=True)
        replayed = self._rerun.statements(step, inquiry.chain, attempt)
        if (of_ranks := averaged(inquiry, replayed)) is not None:  # also of a replay that came no further than that
            return of_ranks
        sinks = sinks_of(replayed, inquiry) if replayed.finished else None
        outcome = conclude(inquiry, replayed, sinks, "statements", self._note) if sinks else None
        is_named = outcome is not None and outcome.finding is not None and outcome.finding.op is not None
        return replace(outcome, evidence=None) if outcome is not None and is_named else None

    def output(self, step: Step, entry: Entry, tensors: list[torch.Tensor], context: Context) -> Outcome:
        """An outermost module call, without gradients, whose output is bad."""
        alone = Step(entries=[entry], buffers=step.buffers, python=step.python)

        def again() -> Replayed:
            replayed = self._rerun.modules(alone, Attempt((), 0, {}))
            return replace(replayed, finished=not (replayed.problem or replayed.refused), names=variables_of(step.chain))

        replayed = again()
        if replayed.refused:
            refuse(replayed.refused)
        replayed.reproduced = list(map(kind_of, tensors)) == list(map(kind_of, replayed.outputs))
        inquiry = Inquiry(tuple(tensors), {}, step.chain, replace(context, sink=Sink("output")))
        outcome = conclude(inquiry, replayed, bad_outputs(replayed), "module", self._note, only_births=True)
        return self._with_fix(outcome, inquiry, again, bad_outputs, only_births=True)

    def computation(self, computed: Computed, inquiry: Inquiry) -> Outcome:
        """Variables that are NaN at the end of a cell which takes no step."""
        wanted = computed.bad()
        if not wanted:
            return Outcome(None, {})
        again: Again = partial(self._rerun.computation, partial(computed.slice, wanted), wanted, computed.results_in)
        replayed = again()
        if not replayed.finished or not replayed.reproduced:
            return Outcome(None, {})
        outcome = conclude(inquiry, replayed, bad_outputs(replayed), "statements", lambda _: None, only_births=True)
        finding = outcome.finding
        if finding is None or finding.op is None or finding.location is None or finding.diagnosis in {"nan_constant", "inf_constant"}:
            return Outcome(None, {})
        return self._with_fix(outcome, inquiry, again, bad_outputs, only_births=True, what="the cell's result")

    def look(self, step: Step, inquiry: Inquiry) -> tuple[LayerRow, ...]:
        """The layer table of a step with nothing wrong."""
        replayed = self._rerun.statements(step, inquiry.chain, Attempt(inquiry.tensors, step.backward_number, inquiry.leaves))
        if replayed.refused:
            self._note(f"there is no layer table: {replayed.refused}")
        return replayed.observer.layer_rows()

    def _overflows(self, step: Step, inquiry: Inquiry, attempt: Attempt) -> tuple[Any, ...] | None:
        """The scalers without which the same step is finite: they skip it, and that is how it is meant."""
        scalers = live_scalers()
        if not scalers:
            return None
        with at_scale_one(scalers) as used:
            replayed = self._rerun.statements(step, inquiry.chain, attempt)
        if replayed.refused:
            if not may_be_scaling(inquiry.tensors, scalers, inquiry.context.losses):
                return None
            self._note(
                f"treated as an overflow that a GradScaler skips, as the step could not be replayed without its scale: {replayed.refused}"
            )
            return tuple(scalers)
        if not replayed.finished or replayed.reproduced or not used:
            return None  # the loss is the same at scale 1: no scaler is at work here
        bad = any(kind_of(tensor) for tensor in (*replayed.losses, *replayed.gradients.values()))
        return None if bad else tuple(used)
