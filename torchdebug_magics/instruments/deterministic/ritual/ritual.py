"""The ritual: all that makes torch give the same numbers twice, set, and undone.

Whatever it sets is put back, even where the cell has set it otherwise meanwhile. What it does not set, such as the number of threads or
the default dtype, is the user's, and stays as the cell leaves it.
"""

from __future__ import annotations

import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, SupportsIndex

import torch

from torchdebug_magics.errors import refuse
from torchdebug_magics.instruments.deterministic.ops.op_recording import repair
from torchdebug_magics.instruments.deterministic.report import Setting, Warned
from torchdebug_magics.instruments.deterministic.ritual.status import (
    COMPILER,
    DEFAULT_SEED,
    Seedable,
    Switch,
    derived_seed,
    generators_and_loaders,
    mode,
    of_compiler,
    seedables,
    switches,
    too_late,
)
from torchdebug_magics.probing.after_import import AfterImport
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import locate, user_frame
from torchdebug_magics.probing.state.rng import RandomState, same_state

MOST = 2**32 - 1
"""NumPy and PYTHONHASHSEED take no larger one."""
_MESSAGE = r"(?P<op>[^\n]{1,80}?) (?:does not have a deterministic implementation|defaults to a non-deterministic algorithm)"
_MOST = 1_000
"""Lines that are told apart."""


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
        self._strict, self.keep_rng, self._guard = strict, keep_rng, guard
        self._seeds: Seeds | None = None
        self._are_seeds_back = False
        self.alerts = Alerts(guard)
        self._switches: tuple[Switch, ...] = ()
        self._before: dict[str, Any] = {}
        self._during: dict[str, Any] = {}
        self._pending: set[str] = set()
        """Switches that are still to be put back."""

    def attach(self, stack: ExitStack) -> None:
        """Set everything; the stack undoes it."""
        generators, loaders = generators_and_loaders(sys._getframe(), self._guard)
        self.too_late = tuple(too_late(loaders))
        self.generators = tuple(generator.name for generator in generators)
        self.seedables = self._guard.run("looking for seeds", seedables, generators, self._guard) or ()
        self.threads_count = torch.get_num_threads()
        stack.callback(self.undo)
        self.alerts.attach(stack)
        # Where the user has torch raise, it goes on to raise.
        self._turn((*switches(self.seed, strict=self._strict or mode() == "on"), *of_compiler()))
        self.settings = {name: Setting(before, self._during[name]) for name, before in self._before.items() if before != self._during[name]}
        if COMPILER not in sys.modules:
            stack.enter_context(AfterImport(COMPILER, lambda: self._turn(of_compiler() if self._pending else ())))
        self._seeds = Seeds(self.seedables, self._guard)
        self._seeds.sow(self.seed)

    @contextmanager
    def left_off(self) -> Iterator[None]:
        """Meanwhile every setting is as before the ritual."""
        try:
            for one in self._switches:
                one.turn(self._before[one.name])
            yield
        finally:
            for one in self._switches:
                one.turn(self._during[one.name])

    def undo(self) -> None:
        """Put the switches back, and the generators unless they are to be kept; harmless the second time."""
        self._guard.run("looking at what the cell has set", self._note_overruled)
        for one in self._switches:
            if one.name in self._pending:
                self._guard.run(f"putting back {one.name}", one.turn, self._before[one.name])
                self._pending.discard(one.name)
        self.alerts.remove()
        if not (self.keep_rng or self._seeds is None or self._are_seeds_back):
            self._seeds.put_back()
            self._are_seeds_back = True

    @property
    def restored(self) -> bool:
        """Whether a look at all of it finds it as before."""
        is_seed_back = self.keep_rng or (self._seeds is not None and self._seeds.are_back())
        return is_seed_back and all(switch.read() == self._before[switch.name] for switch in self._switches)

    def _turn(self, new: tuple[Switch, ...]) -> None:
        # All are read before the first is set, as some move others.
        self._before |= {switch.name: switch.read() for switch in new}
        self._switches += new
        for switch in new:
            self._pending.add(switch.name)
            self._guard.run(f"setting {switch.name}", lambda one: one.turn(one.wanted(one.read())), switch)
        self._during |= {switch.name: switch.read() for switch in new}

    def _note_overruled(self) -> None:
        self.overruled += tuple(
            f"the cell changed {switch.name} to {_value(now)}; restored to {_value(before)}"
            for switch in self._switches
            if switch.name in self._pending and switch.name in self._during
            if (now := switch.read()) != self._during[switch.name] and now != (before := self._before[switch.name])
        )


def _value(value: object) -> str:
    return "unset" if value is None else str(value)


def checked_seed(seed: SupportsIndex) -> int:
    """The seed as a plain int; a `TorchDebugError` says which there are."""
    try:
        number = -1 if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = -1
    refuse(not 0 <= number <= MOST, f"a seed must be an integer from 0 to {MOST} (the largest that NumPy accepts), not {seed!r}")
    return number


class Seeds:
    """Python's, NumPy's, torch's on every device, and the user's own generators, as they stood before they were seeded."""

    def __init__(self, seedables: Sequence[Seedable], guard: Guard) -> None:
        self._guard = guard
        self._before, self._queued = RandomState.take(), QueuedSeeds()
        # All are read before the first is seeded: two may draw from the same source.
        self._shared = [one for one in seedables if one.is_global]
        own = (one for one in seedables if not one.is_global)
        self._own = [(one, state) for one in own if (state := guard.run(f"reading {one.name}", one.read)) is not None]

    def sow(self, seed: int) -> None:
        """Seed all. CUDA is seeded when torch starts it."""
        for one in self._shared:
            one.sow(seed)
        for one, _ in self._own:
            self._guard.run(f"seeding {one.name}", one.sow, derived_seed(seed, one.name))

    def put_back(self) -> None:
        """Let all stand where they stood."""
        self._before.put_back()
        self._queued.put_back()
        for one, state in self._own:
            self._guard.run(f"putting back {one.name}", one.write, state)

    def are_back(self) -> bool:
        """Whether all stand where they stood."""
        return self._before.holds() and self._queued.are_back() and all(same_state(one.read(), state) for one, state in self._own)


class QueuedSeeds:
    """What waits now for CUDA, and for Intel's GPUs, of those that were not started."""

    def __init__(self) -> None:
        devices: tuple[Any, ...] = (torch.cuda, torch.xpu)
        self._waiting = {device: vars(device._lazy_seed_tracker).copy() for device in devices if not device.is_initialized()}

    def put_back(self) -> None:
        """Let the same wait again; of a device that was started meanwhile, let them be its seeds."""
        for device, waiting in self._waiting.items():
            if not device.is_initialized():
                vars(device._lazy_seed_tracker).update(waiting)
                continue
            device.manual_seed_all(DEFAULT_SEED)
            for call in filter(None, waiting["call_order"]):
                call[0]()

    def are_back(self) -> bool:
        """Whether the same wait; a device that was started is asked for nothing."""
        return all(device.is_initialized() or vars(device._lazy_seed_tracker) == waiting for device, waiting in self._waiting.items())


class Alerts:
    """What torch says of ops that it knows to be non-deterministic, each op of a line once.

    Where the user has let torch warn already, the warnings are still shown as they were; else they are only there because of us.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._shown = self._is_open = False
        self._met: dict[tuple[str, str, int], Warned] = {}
        self._before: Callable[..., None] = warnings.showwarning
        self._hook: Callable[..., None] = self._show
        # A comment makes it this session's own, so that a nested one takes away only its own.
        self._pattern = f"{_MESSAGE}(?#{id(self)})"

    def attach(self, stack: ExitStack) -> None:
        """Listen until the stack closes; to be called before torch is told to warn."""
        stack.callback(self.remove)
        self._shown = mode() == "warn only"
        self._is_open = True
        self._before = warnings.showwarning
        warnings.showwarning = self._hook
        if not self._shown:
            warnings.filterwarnings("always", self._pattern, UserWarning)

    def remove(self) -> None:
        """Listen no more; filters that the user has set meanwhile stay."""
        self._is_open = False
        if warnings.showwarning is self._hook:
            warnings.showwarning = self._before
        filters: Any = warnings.filters
        for one in list(filters):
            if isinstance(one[1], re.Pattern) and one[1].pattern == self._pattern:
                filters.remove(one)

    @property
    def warned(self) -> tuple[Warned, ...]:
        """What was met, in the order in which it was."""
        return tuple(self._met.values())

    def _show(self, message: Any, category: Any, *rest: Any, **named: Any) -> None:
        known = re.match(_MESSAGE, str(message)) if self._is_open else None
        if known is not None:
            self._guard.run("keeping a warning", self._keep, known["op"], str(message))
        if known is None or self._shown:
            self._before(message, category, *rest, **named)

    def _keep(self, op: str, message: str) -> None:
        frame = user_frame(sys._getframe())
        key = (op, "", 0) if frame is None else (op, frame.f_code.co_filename, frame.f_lineno)
        met = self._met.get(key)
        if met is not None:
            self._met[key] = replace(met, count=met.count + 1)
        elif len(self._met) < _MOST:
            place = None if frame is None else locate(frame)
            self._met[key] = Warned(op=op, location=place, message=message, fix=repair(op))
