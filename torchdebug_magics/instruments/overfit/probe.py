"""``%%overfit``: above a training loop, whose DataLoader then gives its first batch again and again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError, refuse
from torchdebug_magics.instrument import SCRIPT, CellContext
from torchdebug_magics.instruments.overfit.examine import REPEATED, explained, stopped
from torchdebug_magics.instruments.overfit.report import OverfitReport, Progress
from torchdebug_magics.instruments.overfit.subjects import Subject, cut, samples_in
from torchdebug_magics.instruments.overfit.training.training import Training
from torchdebug_magics.probing.compiler import eager
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import live_kinds
from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.safety import Guard, interrupts_held
from torchdebug_magics.probing.state.attributes import Names
from torchdebug_magics.probing.state.snapshot import KeptState

_KINDS = (torch.nn.Module, torch.optim.Optimizer)
_NO_BATCH = "the cell draws no batch from a DataLoader: write `%overfit model batch loss_function optimizer`"


class OverfitProbe:
    """Watches the cell as the first training, and runs it again for each trial.

    The first loader gives its first batch for as long as the training wants it; then one an epoch, so that no epoch is empty.
    """

    def __init__(self, context: CellContext = SCRIPT, *, steps: int = 200, samples: int = 8, anyway: bool = False) -> None:
        body = context.body()
        self._most_steps, self._samples = steps, samples
        self._guard = Guard()
        self._hooks = Hooks(self._guard)
        self._body = None if body is None or body.refusal else body
        self._refusal = "" if body is None else body.refusal
        self._base = Training(self._run_again, {}, steps, self._hooks, told=self._told)
        self._progress: Progress | None = None
        self._batch: Any = None
        self._loader: Any = None
        roots = () if body is None else (body.namespace, *body.statements)
        self._effects = Effects(self._guard, *roots, sentence=REPEATED, anyway=anyway)
        self._refused = ""
        self._start: KeptState | None = None
        self._made: KeptState | None = None
        """Models and optimizers that the cell itself has made, as they were before the first step."""
        self._report: OverfitReport | None = None

    def attach(self, stack: ExitStack) -> None:
        """From here on the loader repeats itself; the trials follow when the stack closes."""
        body = self._body
        roots = _live() if body is None else [Names(body.namespace, frozenset(body.namespace.keys() - body.hidden))]
        self._start = KeptState(roots, self._guard, self._effects)
        stack.callback(self._effects.finish)
        stack.push(self._refuse)
        stack.enter_context(self._effects.trial())
        stack.push(partial(self._ended, self._start))
        stack.enter_context(eager())
        stack.enter_context(self._base.opened())
        self._repeat_batch(stack, self._base)

    def sweep(self) -> None:
        """Remove what an interrupt may have left."""
        self._hooks.sweep()
        self._effects.finish()

    def report(self) -> OverfitReport:
        """What was found."""
        return self._report or OverfitReport(passed=False, losses=tuple(self._base.losses), reason=self._refused or _NO_BATCH)

    def live(self) -> Progress | None:
        """The curve so far."""
        return self._progress

    def kept(self) -> dict[str, object]:
        """Nothing."""
        return {}

    def _run_again(self, training: Training) -> None:
        """The whole cell once more."""
        refuse(self._body is None, "a `with` statement runs once: no change can be tried")
        assert self._body is not None
        with ExitStack() as stack:
            self._repeat_batch(stack, training)
            self._body.run()

    def _repeat_batch(self, stack: ExitStack, training: Training) -> None:
        """Let the loader repeat itself for one run of the loop."""
        is_over = is_open = False
        given: weakref.WeakSet[Any] = weakref.WeakSet()

        def next_batch(original: Callable[[Any], Any], iterator: Any) -> Any:
            nonlocal is_over, is_open
            loader = getattr(iterator, "_dataset", None)
            if self._loader is None:
                self._guard.run("keeping what the cell has made", self._keep_made)
                self._batch, self._loader = cut(original(iterator), self._samples), loader
            elif loader is not self._loader:
                return original(iterator)
            if is_open:
                is_open = False
                is_over = training.end() or is_over
            if not is_over:
                training.begin()
                is_open = True
            elif iterator in given:
                raise StopIteration
            else:
                given.add(iterator)
            return self._batch

        self._hooks.loader_batches(stack, next_batch)

    def _refuse(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if isinstance(error, Irrevocable):
            self._refused = str(error)
            raise TorchDebugError(self._refused) from None

    def _told(self, losses: list[float]) -> None:
        if len(losses) == 1:
            self._effects.attribute()
        self._progress = Progress("training", tuple(losses))

    def _keep_made(self) -> None:
        assert self._start is not None
        known = {id(each) for kind in _KINDS for each in self._start.of_kind(kind)}
        made = [each for each in _live() if id(each) not in known]
        self._made = KeptState(made, self._guard, self._effects) if made else None

    def _ended(self, start: KeptState, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        names, hidden = ({}, frozenset[str]()) if self._body is None else (self._body.namespace, self._body.hidden)
        bound = dict(names)
        try:
            if self._loader is not None and (kind is None or issubclass(kind, Exception)):
                self._base.error = error if isinstance(error, Exception) else None
                self._explain(start, bound)
            elif isinstance(error, KeyboardInterrupt):
                self._report = stopped([self._base], tuple(self._guard.problems))
        finally:
            with interrupts_held():
                self._hooks.sweep()
                # The names of the cell mean what its first run has left: the trials made objects of their own.
                for name in names.keys() - bound.keys() - hidden:
                    del names[name]
                names.update({name: value for name, value in bound.items() if name not in hidden})
                if self._made is not None:
                    self._made.put_back()
                    self._made = None
                start.put_back()

    def _explain(self, start: KeptState, bound: Mapping[str, object]) -> None:
        first = {"model": next(iter(self._base.models.values()), None), "optimizer": next(iter(self._base.optimizers), None)}
        written = {id(value): name for name, value in reversed(list(bound.items()))}
        names = {word: written[id(value)] for word, value in first.items() if value is not None and id(value) in written}
        notes = (f"no change was tried: {self._refusal}",) if self._refusal else ()
        subject = Subject(self._run_again, {}, (), samples_in(self._batch), names, notes)
        show = partial(setattr, self, "_progress")
        with eager():
            examined = explained(subject, self._most_steps, start, self._guard, self._hooks, show, self._base)
        self._report = examined.report if isinstance(examined.report, OverfitReport) else None
        if isinstance(examined.error, KeyboardInterrupt):
            raise examined.error


watch = OverfitProbe


def _live() -> list[object]:
    return [one for kind in live_kinds(*_KINDS).values() for one in kind]
