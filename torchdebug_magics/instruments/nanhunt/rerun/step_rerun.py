"""A step, once more: everything put back as it was at its start, run under an observer, and everything put back again afterwards."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, MappingProxyType
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchdebug_magics.errors import error_line
from torchdebug_magics.instruments.nanhunt.replay.op_trace import Trace
from torchdebug_magics.instruments.nanhunt.rerun.attempt import (
    Attempt,
    CannotReplay,
    Position,
    Replayed,
    agree,
    badly_alike,
    base_of,
    caller,
    outside_transforms,
    places,
    refuse,
    same_bits,
    same_call,
    same_kinds,
)
from torchdebug_magics.instruments.nanhunt.rerun.step_recorder import Entry, Step, StepRecorder
from torchdebug_magics.instruments.nanhunt.rerun.step_slice import Slice, cut, cut_graphs, values_in
from torchdebug_magics.instruments.nanhunt.rerun.written_places import iterators_in
from torchdebug_magics.probing.compiler import eager
from torchdebug_magics.probing.dispatch import enter, modes_aside
from torchdebug_magics.probing.distributed.unsent_collectives import LoneRerun, OthersNeeded
from torchdebug_magics.probing.graphs import leaves_of
from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.outside.surroundings import used_by_other_threads
from torchdebug_magics.probing.safety import Guard, quiet
from torchdebug_magics.probing.source.user_code import frames_above
from torchdebug_magics.probing.state.contents import Writes
from torchdebug_magics.probing.state.snapshot import Snapshot, listening
from torchdebug_magics.probing.tensors import is_bad, tensors_in


class ReplayState:
    """Everything that a replay may change, as it is now; the step's start in its place, and back again.

    `reached`: objects that the replayed code begins from. `before`: torch's random state before the first statement. `guard` notes what
    could not be put back. No context manager: an interrupt at the edge of one leaves it open, and this must never stay half done.
    """

    def __init__(
        self,
        step: Step,
        before: torch.Tensor | None,
        leaves: Iterable[torch.Tensor],
        modules: list[torch.nn.Module],
        reached: Iterable[object],
        guard: Guard,
    ) -> None:
        self._step, self._before, self._guard = step, before, guard
        self.alone = LoneRerun()
        self.alone.refuse(modules)
        self._leaves = list(leaves)
        written = [target for state in step.python for target in state.objects()]
        self._kept = Snapshot([*written, *reached, *modules, *self._leaves, *listening()])
        buffers = (buffer for module in modules for inner in module.modules() for buffer in inner._buffers.values())
        for tensor in (*buffers, *(kept.tensor for entry in step.entries for kept in entry.copies)):
            if tensor is not None and not is_lazy(tensor):
                self._kept.contents.keep(tensor)
        self.writes = Writes(self._kept.contents)
        self._others = used_by_other_threads()

    def start(self) -> None:
        """All as it was when the step began."""
        self.alone.start()
        for leaf in self._leaves:
            leaf.grad = None
        for buffer in self._step.buffers:
            buffer.put_back()
        for state in self._step.python:
            state.put_back(self._guard, self._others)
        if self._step.entries:
            self._step.entries[0].random.put_back()
        if self._before is not None:
            torch.set_rng_state(self._before)
        for kept in (kept for entry in self._step.entries for kept in entry.copies):
            kept.put_back()

    def undo(self) -> None:
        """All as it was when this was made. May be done twice, where an interrupt has ended the first time."""
        self._kept.put_back(self._guard, self._others)
        self.alone.put_back()


_REPEATED = "it {}, which a replay would repeat: `--anyway` replays it all the same"


class _Enough(BaseException):
    """Ends a replay right after the backward() that is looked into. No `except Exception` of the user's stops it."""


class StepRerun:
    """Runs one step again. While it runs, `active` is set and the probe hands it every sink call.

    `observe` makes what looks at a rerun, a new one each time.
    """

    def __init__(self, recorder: StepRecorder, observe: Callable[[], Trace], *, anyway: bool = False) -> None:
        self.recorder = recorder
        self._anyway = anyway
        self._effects: Effects | None = None
        self._observe = observe
        self._attempt: Attempt | None = None
        self._replayed: Replayed | None = None
        self._seen = 0
        self._feed: Feed | None = None
        self._state: ReplayState | None = None

    @property
    def active(self) -> bool:
        """Whether a replay is running now. One that interrupts have ended, also in the middle of putting things back, is undone here."""
        if self._attempt is None:
            return False
        is_running = any(frame.f_code is StepRerun._run.__code__ for frame in frames_above(sys._getframe(1)))
        if not is_running:
            self.recover()
        return is_running

    def recover(self) -> None:
        """Undo what is left of a replay."""
        self.recorder.fed()
        if self._effects is not None:
            self._effects.recover()
        if self._state is not None:
            self._state.undo()
        self._state = self._attempt = self._replayed = self._feed = None

    def forget(self) -> None:
        """No replay follows: the copies of files go."""
        if self._effects is not None:
            self._effects.finish()
            self._effects = None

    def statements(
        self,
        step: Step,
        sink: tuple[Position, ...],
        attempt: Attempt,
        wanted: str = "",
        held: Mapping[str, Any] = MappingProxyType({}),
        *,
        graphs: bool = True,
    ) -> Replayed:
        """Re-execute the step's own statements, and those that made the variable `wanted`. See `cut`."""

        def sliced() -> Slice:
            part = cut(step, sink, wanted, held, graphs=graphs)
            for name in iterators_in(part.names, part.statements):
                refuse(f"it takes from the iterator {name}, which cannot be rewound")
            return part

        return self._run(step, attempt, sliced)

    def modules(self, step: Step, attempt: Attempt) -> Replayed:
        """Call only the recorded outermost modules again, where the statements cannot be."""
        recorded = [entry for entry in step.entries if entry.recorded]
        if not recorded:
            return Replayed(self._observe(), refused="no model call was recorded in this step")
        outputs: list[Any] = []

        def run() -> None:
            outputs.extend(entry.module(*entry.args, **entry.kwargs) for entry in recorded)

        replayed = self._run(step, attempt, run=run)
        replayed.outputs = tuple(tensors_in(outputs))
        return replayed

    def computation(
        self, sliced: Callable[[], Slice], wanted: tuple[str, ...], results_in: Callable[[Any], Iterator[torch.Tensor]]
    ) -> Replayed:
        """Execute statements that take no step again, for the results that they leave in some variables."""
        replayed = self._run(Step(), Attempt((), 1, {}), sliced)
        now, then = (
            tuple(tensor for name in wanted for tensor in results_in(names.get(name))) for names in (replayed.names, replayed.made)
        )
        replayed.outputs, replayed.finished = now, not replayed.problem and not replayed.refused
        replayed.reproduced = same_kinds(now, then)
        return replayed

    def call(self, run: Callable[[], object], reached: Sequence[object]) -> Replayed:
        """Call a function of ours that runs code of the user's, which begins from the objects in `reached`."""
        outputs: list[object] = []
        replayed = self._run(Step(), Attempt((), 1, {}), run=lambda: outputs.append(run()), reached=reached)
        replayed.outputs, replayed.finished = tuple(tensors_in(outputs)), not replayed.problem and not replayed.refused
        return replayed

    def sink_call(self, original: Any, tensors: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        """A backward (or grad) call inside the replay: let it run, and stop when it was the one."""
        attempt, replayed = self._attempt, self._replayed
        if attempt is None or replayed is None:
            return original(*args, **kwargs)
        # What runs before the step's first model call, as in a function that makes its argument, was no part of the step.
        self._seen += self._feed is None or self._feed.has_begun
        last = self._seen >= attempt.number
        with modes_aside(), outside_transforms():  # what we ask must not stand in the trace
            if last:
                # Statements that make a model, or a leaf, make another one in the replay: its gradients count as well.
                attempt.leaves.update({id(leaf): leaf for leaf in leaves_of(tensors) if leaf.grad is None})
                replayed.losses = tensors
                replayed.reproduced = same_bits(tensors, attempt.original) and self._went_the_same_way(replayed)
            replayed.observer.backward_begins(sys._getframe(0), tensors, is_end=last and not attempt.until_update)
        try:
            result = original(*args, **kwargs)
        except RuntimeError as error:
            if not last:
                raise
            # A graph from before the step is gone; the forward was seen all the same.
            replayed.problem, replayed.finished = f"the replay of backward() raised: {str(error).splitlines()[0]}", True
            raise _Enough from error
        finally:
            replayed.observer.backward_ends(is_the_one=last)
        if last and not attempt.until_update:
            self._finish(attempt, replayed, result)
        return result

    def _went_the_same_way(self, replayed: Replayed) -> bool:
        """Of a bad loss all bits may agree by chance: one NaN is as another. Then the step's own variables tell."""
        if not any(map(is_bad, replayed.losses)):
            return True
        return all(agree(replayed.names.get(name), then, same_bits, unknown=True) for name, then in replayed.made.items())

    def inner_call(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """A first derivative that is a part of the loss: its ops belong to forward ops, too."""
        observer = None if self._replayed is None else self._replayed.observer
        if observer is None or observer.backward_frame is not None:
            return original(*args, **kwargs)
        observer.backward_begins(sys._getframe(0), (), is_end=False)
        try:
            return original(*args, **kwargs)
        finally:
            observer.backward_ends(is_the_one=False)

    def update_call(self) -> None:
        """An optimizer's step inside the replay: it must never happen."""
        if self._attempt is not None and self._replayed is not None and self._attempt.until_update:
            self._finish(self._attempt, self._replayed, None)
        raise _Enough

    @staticmethod
    def _finish(attempt: Attempt, replayed: Replayed, result: Any) -> None:
        results = result if isinstance(result, (tuple, list)) else ()
        replayed.gradients = {
            **{str(key): leaf.grad for key, leaf in attempt.leaves.items() if leaf.grad is not None},
            **{f"result {place}": base_of(one) for place, one in enumerate(results) if isinstance(one, torch.Tensor)},
        }
        replayed.finished = True
        raise _Enough

    def _run(
        self,
        step: Step,
        attempt: Attempt,
        sliced: Callable[[], Slice] | None = None,
        *,
        run: Callable[[], object] = lambda: None,
        reached: Sequence[object] = (),
    ) -> Replayed:
        """Run statements, or else `run`; what is returned says why they cannot be."""
        replayed = self._replayed = Replayed(self._observe())
        try:
            if not all(entry.unchanged() for entry in step.entries):
                refuse("the model writes into its input, which is not what it was any more")
            part = None if sliced is None else sliced()
            self._attempt, self._seen = attempt, 0
            if part is not None:
                replayed.names, replayed.made = part.names, part.made
            entered, guard = self.recorder.models.entered(), self.recorder.guard
            self._effects = self._effects or Effects(guard, sentence=_REPEATED, anyway=self._anyway)
            self._feed = Feed(step.entries, part.code if part is not None else None, replayed.observer)
            with self._effects.trial(*(() if part is None else (part.code, part.names)), *reached, *entered):
                attempt.leaves.update(cut_graphs(part) if part is not None else {})
                before = None if part is None else step.before if step.entries else self.recorder.between
                state = self._state = ReplayState(step, before, attempt.leaves.values(), entered, [*values_in(part), *reached], guard)
                state.start()
                self.recorder.feed(self._feed)
                self._execute(replayed, state, run if part is None else partial(exec, part.code, part.names))
        except (CannotReplay, OthersNeeded, Irrevocable) as reason:
            return Replayed(replayed.observer, refused=str(reason))
        finally:
            try:
                self.recover()
            except BaseException:  # an interrupt in the middle of it
                self.recover()
                raise
        return replayed

    def _execute(self, replayed: Replayed, state: ReplayState, run: Callable[[], object]) -> None:
        with quiet(), eager(), contextlib.ExitStack() as stack:
            enter(stack, state.writes.listener(self.recorder.hooks))
            replayed.observer.attach(stack)
            state.alone.attach(stack, self.recorder.hooks)
            try:
                run()
            except _Enough:
                pass
            except CannotReplay:
                raise
            except Exception as error:  # noqa: BLE001 - the replayed code is the user's: its failure means the replay went another way
                replayed.problem = f"the replay raised {error_line(error)}"
        if state.alone.collectives.refused:  # it would have needed an answer of another rank
            refuse(state.alone.collectives.refused)
        replayed.exchanges, replayed.averaging = tuple(state.alone.collectives.exchanges), tuple(state.alone.wrappers)


class Feed:
    """Knows the recorded calls by their place: code that makes an argument may call the same model, and that is another call."""

    def __init__(self, entries: list[Entry], code: CodeType | None, observer: Trace) -> None:
        self._entries = entries
        self._code = code
        self._observer = observer
        self._next = 0

    @property
    def has_begun(self) -> bool:
        """Whether the first model call of the step is over, or the step has none."""
        return self._next > 0 or not self._entries

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """What the call was given in the bad step, with the random state that it began with; None for a call that is none of these."""
        here = () if self._code is None else places(caller(sys._getframe(1)), self._code)
        for number in range(self._next, len(self._entries)):
            entry = self._entries[number]
            if type(entry.module) is type(module) and same_call(entry.place, here):
                self._next = number + 1
                # A model that the step makes is another one in the replay, which makes it anew with all that it is given.
                return self._given(entry, args, kwargs) if entry.module is module else None
        return None

    def _given(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if not entry.recorded:
            return None
        entry.random.put_back()
        with modes_aside():  # what we ask must not stand in the trace
            return _merged((args, kwargs), (entry.args, entry.kwargs), self._observer)


def _merged(evaluated: tuple[Any, Any], recorded: tuple[Any, Any], observer: Trace) -> tuple[Any, Any]:
    """The recorded arguments, but for tensors inside the graph, and those that were made again with the same bits.

    The first must belong to the graph of the replay; of the others the replay knows how they were made. It also knows that of a tensor
    which is bad in the same elements, and differs in its good ones: they hang on random numbers from before the step.
    """
    new, shape = tree_flatten(evaluated)
    old, old_shape = tree_flatten(recorded)
    if shape != old_shape:
        return recorded
    merged = []
    for now, then in zip(new, old, strict=True):
        taken = then
        if isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor) and now is not then:
            comparable = now.requires_grad == then.requires_grad
            if then.grad_fn is not None or (comparable and agree(now, then, same_bits, unknown=False)):
                taken = now
            elif comparable and agree(now, then, badly_alike, unknown=False):
                observer.stands_for(then, now)
        merged.append(taken)
    together: tuple[Any, Any] = tree_unflatten(merged, shape)
    return together
