"""The ritual: all that makes torch give the same numbers twice, set, and undone.

Whatever it sets is put back, even where the cell has set it otherwise meanwhile. What it does not set, such as the number of threads or
the default dtype, is the user's, and stays as the cell leaves it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.deterministic.report import Setting
from torchdebug_magics.instruments.deterministic.ritual.alerts import Alerts
from torchdebug_magics.instruments.deterministic.ritual.found_sources import Sources
from torchdebug_magics.instruments.deterministic.ritual.late import too_late
from torchdebug_magics.instruments.deterministic.ritual.seedable import seedables
from torchdebug_magics.instruments.deterministic.ritual.seeds import Seeds, checked_seed
from torchdebug_magics.instruments.deterministic.ritual.switches import COMPILER, INDUCTOR, Switch, mode, switches
from torchdebug_magics.probing.after_import import AfterImport

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.report import Warned
    from torchdebug_magics.instruments.deterministic.ritual.seedable import Seedable
    from torchdebug_magics.probing.guard import Guard

__all__ = ["Ritual"]


class Ritual:
    """From `attach` until the stack closes. A wrong seed is a `TorchDebugError`."""

    def __init__(self, seed: int, *, strict: bool, keep_rng: bool, guard: Guard) -> None:
        self.seed = checked_seed(seed)
        self.settings: dict[str, Setting] = {}
        """Of those that were changed, by name."""
        self.too_late: tuple[str, ...] = ()
        self.overruled: tuple[str, ...] = ()
        """What the user's code has set otherwise, a sentence each."""
        self.generators: tuple[str, ...] = ()
        """Names of the user's own that were seeded."""
        self.seedables: tuple[Seedable, ...] = ()
        """As they were before the ritual seeded them."""
        self.threads_count = torch.get_num_threads()
        self._strict = strict
        self._keep_rng = keep_rng
        self._guard = guard
        self._seeds = Seeds(self.seed, guard)
        self._alerts = Alerts(guard)
        self._switches: tuple[Switch, ...] = ()
        self._before: dict[str, Any] = {}
        self._during: dict[str, Any] = {}
        self._pending: set[str] = set()
        """Switches that are still to be put back."""

    def attach(self, stack: ExitStack) -> None:
        """Set everything; the stack undoes it."""
        sources = self._guard.run("looking for generators and loaders", Sources.found_from, sys._getframe()) or Sources((), ())
        self.too_late = tuple(too_late(sources.loaders))
        self.generators = tuple(one.name for one in sources.generators)
        self.seedables = self._guard.run("looking for seeds", seedables, sources.generators) or ()
        self.threads_count = torch.get_num_threads()
        stack.callback(self.undo)
        self._alerts.attach(stack)
        self._turn_all()
        if COMPILER not in sys.modules:
            stack.enter_context(AfterImport(COMPILER, self._compiler_imported))
        self._seeds.attach(stack, sources.generators, keep=self._keep_rng)

    @contextmanager
    def with_only(self, name: str) -> Iterator[None]:
        """Meanwhile no setting holds but that one, if there is one of that name: to see what it costs."""
        try:
            for one in self._switches:
                one.turn(self._during[one.name] if one.name == name else self._before[one.name])
            yield
        finally:
            for one in self._switches:
                one.turn(self._during[one.name])

    def undo(self) -> None:
        """Put the switches back, and the generators unless they are to be kept; harmless the second time."""
        if INDUCTOR in self._before and self._before[INDUCTOR] is None:  # imported by another thread, if at all: it was never set
            self._before[INDUCTOR] = self._during[INDUCTOR] = next(one.read() for one in self._switches if one.name == INDUCTOR)
        self._guard.run("looking at what the cell has set", self._note_overruled)
        for one in self._switches:
            if one.name in self._pending:
                self._guard.run(f"putting back {one.name}", one.turn, self._before[one.name])
                self._pending.discard(one.name)
        self._alerts.remove()
        if not self._keep_rng:
            self._seeds.put_back()

    @property
    def warnings(self) -> tuple[Warned, ...]:
        """The non-deterministic ops that torch has warned of."""
        return self._alerts.warned

    @property
    def restored(self) -> bool:
        """Whether a look at all of it finds it as before."""
        return all(one.read() == self._before[one.name] for one in self._switches) and (self._keep_rng or self._seeds.are_back())

    def _turn_all(self) -> None:
        # Where the user has torch raise, it goes on to raise.
        self._switches = switches(self.seed, strict=self._strict or mode() == "on")
        # All are read before the first is set, as some move others.
        self._before = {one.name: one.read() for one in self._switches}
        for one in self._switches:
            self._pending.add(one.name)
            self._guard.run(f"setting {one.name}", one.set)
        self._during = {one.name: one.read() for one in self._switches}
        self.settings = {name: Setting(before, self._during[name]) for name, before in self._before.items() if before != self._during[name]}

    def _compiler_imported(self) -> None:
        """Its setting is there only now."""
        one = next(one for one in self._switches if one.name == INDUCTOR)
        if one.name in self._pending and self._before[one.name] is None:
            self._before[one.name] = one.read()
            self._guard.run(f"setting {one.name}", one.set)
            self._during[one.name] = one.read()

    def _note_overruled(self) -> None:
        self.overruled += tuple(
            f"the cell changed {one.name} to {_value(now)}; restored to {_value(before)}"
            for one in self._switches
            if one.name in self._pending and one.name in self._during
            if (now := one.read()) != self._during[one.name] and now != (before := self._before[one.name])
        )


def _value(value: object) -> str:
    return "unset" if value is None else str(value)
