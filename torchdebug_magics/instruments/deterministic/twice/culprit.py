"""From the first difference between two runs to its cause."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from torchdebug_magics.errors import error_line
from torchdebug_magics.instruments.deterministic.counterfactual.set_order import Ordering, dependence_of
from torchdebug_magics.instruments.deterministic.ops.digest_recorder import DigestRecorder
from torchdebug_magics.instruments.deterministic.ops.op_recording import Empty, Op, Recording, Seen, repair
from torchdebug_magics.instruments.deterministic.report import Cause, Dependence, Divergence
from torchdebug_magics.instruments.deterministic.twice.answers import ADDRESS, ARRIVAL, CLOCK, ENTROPY, Answers, OutsideCall
from torchdebug_magics.instruments.deterministic.twice.body import TooLong, processes_count, workers_here
from torchdebug_magics.instruments.deterministic.twice.run_comparison import Difference, RunComparison
from torchdebug_magics.instruments.deterministic.twice.runs import Runs, Vary, nothing
from torchdebug_magics.probing.source.syntax import called, enclosing, nodes, tree_of
from torchdebug_magics.probing.source.user_code import raised_at

_FIRST_ALONE = "later runs agree with the second one: the first run left state that could not be restored, such as a cache entry"
_IN_THE_CELL = "create what the cell consumes in the cell itself"
_LEAST_TRIES, _MOST_TRIES, _MOST_S = 2, 8, 3.0
"""Of runs that are to agree, as two may by chance; only long ones are made less often."""


class Culprit:
    """What differed between the first run and the second, and why."""

    def __init__(
        self, comparison: RunComparison, error: BaseException | None, runs: Runs, used_up: Sequence[str], orders: Iterable[Ordering]
    ) -> None:
        self._comparison = comparison
        self._error = error
        self._runs = runs
        self._used_up = used_up
        self._orders = orders
        """Of the second run."""

    def unexplained(self) -> Divergence:
        """The op, before any further run looks for the cause."""
        return self._told("unknown", "the search for the cause was interrupted")

    def divergence(self) -> Divergence:
        """The op, and the cause: mostly by a few further runs."""
        difference = self._comparison.difference
        if difference is None:
            return self._of_error()
        op = difference.op
        if difference.kind == "way" or op is None:
            return self._of_way(difference)
        if difference.kind == "given":
            return self._of_outside(op, difference)
        return self._of_generator(op, difference) if op.plan.is_random else self._of_result(op, difference)

    def _told(self, cause: Cause, explanation: str, fix: str = "", **more: Any) -> Divergence:
        """`more` are fields of a `Divergence` that are not those of the op."""
        difference, earlier = self._comparison.difference, self._comparison.earlier
        fields: dict[str, Any] = {"op": "", "location": raised_at(self._error), "module": None, "occurrence": 1}
        if difference is not None:
            fields = {"op": difference.op_name, "location": difference.location, "module": difference.module, "phase": difference.phase}
            fields["occurrence"] = earlier.occurrence(difference.place) if difference.place < len(earlier) else 1
        fields |= more
        if fields.get("other") == fields["location"]:
            fields["other"] = None
        return Divergence(cause=cause, explanation=explanation, fix=fix, **fields)

    def _of_error(self) -> Divergence:
        """The second run raised where the first one did not, after the very same ops."""
        error = self._error
        if isinstance(error, TooLong):
            return self._told("control_flow", "the second run continued past the end of the first one, and was stopped")
        said = f"the second run raised {error_line(error, 200)}"
        found = self._of_leak(said) or self._of_answers(len(self._comparison.earlier))
        return found or self._of_first_run("outside_data", said, type(self._runs.unwatched()) is type(error))

    def _of_result(self, op: Op, difference: Difference) -> Divergence:
        agree = self._inputs_agree(difference.place)
        kernel = self._of_kernel(op)
        is_known = agree and (kernel.fix or not op.plan.name.startswith("aten."))
        if not is_known and (asked := self._of_answers(op.place)) is not None:  # two further runs may agree by chance
            return asked
        if op.empty is not None:
            return self._of_empty(op, op.empty, difference)
        if agree:
            return kernel if kernel.fix else self._of_set() or kernel
        return self._of_outside(op, difference)

    def _of_empty(self, op: Op, empty: Empty, difference: Difference) -> Divergence:
        """It reads memory that another op has made."""
        made, base = None if empty.line is None else empty.line.location, empty.plan.base
        origin = f"`{'torch.empty' if base == 'empty' else base}`{f' ({made})' if made else ''}"
        said = f"`{op.plan.name}` reads uninitialized memory from {origin}"
        zeros = f"use `torch.{base.replace('empty', 'zeros')}` instead of `torch.{base}`, or " if base in {"empty", "empty_like"} else ""
        fix = f"{zeros}write every element before reading"
        at = made or difference.location
        return self._told("uninitialized_memory", said, fix, op=empty.plan.name, location=at, other=difference.location, on="memory")

    def _of_kernel(self, op: Op) -> Divergence:
        """Its inputs agree."""
        if op.plan.is_steady:
            alone = "which it cannot do by itself: something else wrote to its memory"
            return self._told("unknown", f"`{op.plan.name}` gave different numbers on equal inputs, {alone}")
        fix = repair(op.plan.base)
        known = "as PyTorch's documentation says it may" if fix else "and no workaround is known"
        return self._told("nondeterministic_op", f"`{op.plan.name}` gave different numbers on equal inputs, {known}", fix, on="race")

    def _of_generator(self, op: Op, difference: Difference) -> Divergence:
        """What the op draws from has another seed; and where it got that."""
        given = (argument for argument in (*op.args, *op.kwargs.values()) if isinstance(argument, torch.Generator))
        generator = next(given, torch.default_generator)
        said = f"`{op.plan.name}` draws from "
        if generator is torch.default_generator:
            said += "torch's global generator, which the cell itself reseeded"
            fix = "remove `torch.seed()`, as this magic has already seeded the generator, or replace it with `torch.manual_seed(42)`"
        else:
            known: Any = generator  # in an op it is wrapped anew: it is known by what is behind it
            held = {name: getattr(value, "_cdata", None) for name, value in difference.names.items() if isinstance(value, torch.Generator)}
            name = next((name for name, behind in held.items() if behind == known._cdata), "")
            said += f"{f'`{name}`' if name else 'a `torch.Generator`'}, which has a different seed in each run"
            fix = f"use `{name or 'generator'}.manual_seed(42)` instead of `.seed()` or a varying seed"
        found = None if self._used_up else self._of_answers(op.place)
        if found is None and generator is torch.default_generator and not self._reseeds():
            return self._told("unknown", f"`{op.plan.name}` drew other numbers, although its generator was seeded for both runs")
        if found is None:
            return self._told("unseeded_generator", said, fix, on="seed")
        if found.cause != "unseeded_generator":
            said, fix = f"{said}: {found.explanation}", found.fix if generator is torch.default_generator else fix
        return replace(found, cause="unseeded_generator", explanation=said, fix=fix)

    def _reseeds(self) -> bool:
        """Whether the text of the body, or a function that it calls by name, asks for another seed."""
        return any(called(call) == "seed" for call in nodes(ast.Call, *self._runs.body.statements))

    def _of_way(self, difference: Difference) -> Divergence:
        """The runs went different ways: another op, another line, or an end."""
        earlier = self._comparison.earlier
        before = earlier[difference.place] if difference.place < len(earlier) else None
        made = None if before is None else earlier.places[before.line]
        there, here = None if made is None else made.location, difference.location
        names = "" if before is None else [*earlier.ops][before.op], difference.op_name
        went = [f"to `{name}` ({at})" if name else "to its end" for name, at in zip(names, (there, here), strict=True)]
        said = f"the first run continued {went[0]}, the second one {went[1]}"
        leak = self._of_leak(said)
        if leak is not None:
            return replace(leak, cause="control_flow", op=names[0] or leak.op, location=there or leak.location, other=here)
        found = self._of_answers(None)
        at, other, name = (there, here, names[0]) if there is not None else (here, None, names[1])
        depths = [0 if line is None else len([*enclosing(tree_of(line.file), line.line)]) for line in (there, here)]
        if there is not None and found is not None and depths[1] > depths[0]:
            at, name = here, names[1]  # which run is the longer one is chance; the op in the loop is told
        if found is not None:
            line_asked = found.other or found.location
            other = None if line_asked == at else line_asked
            return replace(found, cause="control_flow", explanation=f"{said}: {found.explanation}", op=name, location=at, other=other)
        return self._of_first_run("control_flow", said, self._is_first_alone(difference), op=name, location=at, other=other)

    def _of_outside(self, op: Op, difference: Difference) -> Divergence:
        """What came into the op was not made by an op."""
        said = f"`{op.plan.name}` received different input, created outside PyTorch"
        found = self._of_leak(said) or self._of_answers(op.place) or self._of_set()  # after a leak, each run uses up more
        return found or self._of_first_run("outside_data", said, self._is_first_alone(difference))

    def _of_first_run(self, otherwise: Cause, said: str, is_first_alone: bool, **more: Any) -> Divergence:
        """No answer is behind it: the first run has left something that later ones find, or nothing more is known."""
        if is_first_alone:
            return self._told("state_leak", f"{said}: {_FIRST_ALONE}", _IN_THE_CELL, **more)
        return self._told(otherwise, said, **more)

    def _of_set(self) -> Divergence | None:
        """Objects in a set stand where their addresses put them, and those differ in each run."""
        order = next((order for order in self._orders if order.kind != "salted"), None)
        return None if order is None else self._of_dependence("hash_order", dependence_of(order))

    def _of_leak(self, said: str) -> Divergence | None:
        if self._used_up:
            gone = ", ".join(self._used_up)
            return self._told("state_leak", f"{said}: {gone} could not be restored for the second run", _IN_THE_CELL, on="carried_state")
        if "backward through the graph a second time" in said:
            explanation = f"{said}: the graph was built before this cell, and the first run freed it"
            return self._told("state_leak", explanation, "compute the loss in the cell that calls `backward()`", on="carried_state")
        return None

    def _of_answers(self, place: int | None) -> Divergence | None:
        """What the op at `place` depends on by way of what the run is answered; of all ops without a place."""
        processes = processes_count()
        if found := asked_by(self._runs, place):
            return self._of_asked(found)
        found = asked_by(self._runs, None, also=workers_here) if processes_count() != processes else ()
        return self._of_worker(found[0], self._of_asked(found)) if found else None

    def _of_asked(self, found: Sequence[OutsideCall]) -> Divergence:
        influence = found[0].influence
        further = tuple(call.dependence for call in found[1:] if call.influence.on is not None and call.influence is not influence)
        return self._of_dependence(influence.cause, found[0].dependence, on=influence.on, further=further)

    def _of_dependence(self, cause: Cause, known: Dependence, **more: Any) -> Divergence:
        return self._told(cause, known.what, known.fix, other=known.location, **{"on": known.on} | more)

    @staticmethod
    def _of_worker(asked: OutsideCall, told: Divergence) -> Divergence:
        why = "the DataLoader seeds torch in each worker"
        if asked.influence in {CLOCK, ENTROPY}:
            return replace(told, fix=f"in a worker, replace `{asked.text}` with `torch.initial_seed() % 2**32`: {why}")
        fix = f"replace `{asked.text}` with a draw from torch (`torch.rand`, `torch.randint`): {why}"
        return replace(told, cause="worker_seed", fix=told.fix if asked.function == "__getitem__" else fix)

    # --- further runs

    def _is_first_alone(self, difference: Difference) -> bool:
        """Whether two more runs do what the second one did: then the first one has left something that it did not find itself."""
        seen = None if difference.op is None else difference.op.seen._replace(gave=0)
        return all(self._seen_at(difference.place) == seen for _ in range(2))

    def _inputs_agree(self, place: int) -> bool:
        """Whether an op is given the same in two more runs, each of its inputs read just before it; not where it was not reached."""
        first = self._seen_at(place, thorough_at=place)
        return first is not None and first == self._seen_at(place, thorough_at=place)

    def _seen_at(self, place: int, *, thorough_at: int = -1) -> Seen | None:
        """The op at a place of one more run, and what it is given; None where the run ends before."""
        recording = self._comparison.earlier.another()
        recorder = DigestRecorder(recording, self._runs.guard, self._runs.hooks, thorough_at=thorough_at)
        recorder.until = place
        self._runs.again(recorder)
        return recording[place]._replace(gave=0) if recorder.is_over else None


def asked_by(runs: Runs, place: int | None, also: Vary = nothing) -> tuple[OutsideCall, ...]:
    """The calls whose answers make what comes up to the op at `place` differ, in the order in which they ask; none if no answer does.

    Without a place, what the whole run does. Each run begins after `also`.
    """
    search = _HeldAnswers(runs, sys.maxsize if place is None else place, also)
    every = tuple(search.asked)
    kinds = dict.fromkeys(call.influence for call in every)
    for influence in sorted(kinds, key=lambda influence: influence is not ARRIVAL):  # an order, before what only delays
        asked = tuple(call for call in every if call.influence is influence)
        if len(asked) < len(every) and search.agrees(frozenset(asked)) and (needed := search.needed(asked, frozenset(asked))):
            return needed
    if not every or not search.agrees(frozenset(every)):
        return ()
    # Runs one right after the other are often given the same memory: what agrees though no address is held has not agreed with the first.
    return search.needed(every, frozenset(every)) or tuple(call for call in every if call.influence is ADDRESS)


class _HeldAnswers:
    """Runs that are given answers of one run, and are compared with it."""

    def __init__(self, runs: Runs, place: int, also: Vary) -> None:
        self._runs, self._place, self._also = runs, place, also
        self._recording = Recording()
        answers = Answers(runs.body.namespace)
        recorder = DigestRecorder(self._recording, runs.guard, runs.hooks)
        recorder.until = place
        self._error = self._run(recorder, answers)
        self.asked = answers.given

    def _run(self, watch: DigestRecorder, answers: Answers) -> BaseException | None:
        def vary(stack: ExitStack) -> None:
            self._also(stack)
            answers.attach(stack)

        return self._runs.again(watch, vary=vary)

    def agrees(self, held: frozenset[OutsideCall]) -> bool:
        """Whether runs with these answers do what the first one did."""
        begin_s = time.monotonic()
        for count in range(_MOST_TRIES):
            if count >= _LEAST_TRIES and time.monotonic() - begin_s > _MOST_S:
                break
            comparison = RunComparison(self._runs, self._recording)
            comparison.until = self._place
            error = self._run(comparison, Answers(self._runs.body.namespace, self.asked, held))
            if error is None and not comparison.is_over:
                comparison.end()
            if comparison.difference is not None or type(error) is not type(self._error):
                return False
        return True

    def needed(self, group: tuple[OutsideCall, ...], held: frozenset[OutsideCall]) -> tuple[OutsideCall, ...]:
        """The calls of a group without whose answers runs that hold all others differ."""
        if self.agrees(held.difference(group)):
            return ()
        if len(group) == 1:
            return group
        half = len(group) // 2
        return (*self.needed(group[:half], held), *self.needed(group[half:], held)) or group[:1]
