"""Sees every op of a run, as it is dispatched; and takes the fingerprint of the run."""

from __future__ import annotations

import linecache
import math
import sys
import weakref
from array import array
from contextlib import ExitStack
from os import getpid
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing import reductions

from torchdebug_magics.instruments.deterministic.fingerprint import OVERWRITTEN, RECORD, Fingerprint, Update
from torchdebug_magics.instruments.deterministic.ops.op_recording import Empty, Op, Plan, Recording, Seen, plan_of, tensors, view_of
from torchdebug_magics.probing import dispatch
from torchdebug_magics.probing.compiler import away_from_the_compiler
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import ModuleCalls, live_modules
from torchdebug_magics.probing.op_recorder import OpRecorder
from torchdebug_magics.probing.ops import written_by
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.user_code import frames_above, is_user_code, location, owner
from torchdebug_magics.probing.state.contents import Contents, memory_of
from torchdebug_magics.probing.state.digest import EMPTY, folded, number_of, of_plain, of_tensor
from torchdebug_magics.probing.tensors import tensors_in

_RESIZING = frozenset({"resize_", "resize_as_"})
"""They keep what was there."""
_BETWEEN = frozenset({dispatch.__file__, torch._ops.__file__, torch._tensor.__file__, torch.functional.__file__})
"""Files whose code does no more than to pass a call on."""
_CALL_THE_USERS = "/twice/body.py"
"""Our own that call what the user has given us."""
_COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/_aot_autograd/", "/torchinductor_")
_COMPILED = ("<eval_with_key>", *_COMPILERS)
_SHARDING = "/torch/distributed/tensor/_sharding_prop.py"
"""Where ops on DTensors are first tried on tensors without data; what came of it is then known, so that no later run does it again."""
_COMPILE = torch._compile.__file__
_DISABLED = "DisableContext."
"""In the name of what torch puts around functions of its own that are not to be compiled, such as `zero_grad`, and around compiled ones."""


class Enough(BaseException):
    """Raised inside an op to end a run. No `except Exception` of the user's catches it."""


class DigestRecorder(OpRecorder[Plan]):
    """Gives each op to `seen`, with its digests; keeps what tensors from before the run held, before they are written.

    Every tensor is read once: when an op has made it, or when it is met for the first time. Only the thread that runs the cell is seen,
    and of compiled code only what it returns.
    """

    def __init__(
        self,
        recording: Recording,
        guard: Guard,
        hooks: Hooks,
        *,
        keeps: bool = True,
        poison: bool = False,
        thorough_at: int = -1,
    ) -> None:
        super().__init__(hooks, guard, takes_apart=True)
        self.recording = recording
        self.contents = Contents()
        self.count = 0
        """Ops so far."""
        self.has_failed = False
        """Whether to look at an op has failed; from there on nothing was seen."""
        self.writers: dict[int, Line] = {}
        """The line that wrote first to each storage from before the run."""
        self._keeps = keeps
        """Whether what is written is to be put back."""
        self._poison = poison
        """Whether new memory is filled with something else than torch fills it with."""
        self._thorough_at = thorough_at
        """The op whose inputs are all read, known or not."""
        self.until = sys.maxsize
        """The op that ends the run; the next one does if it has been passed."""
        self.is_over = False
        """Whether the run was ended there."""
        self._process = getpid()
        self._known: dict[int, weakref.ref[Any]] = {}
        """Storages whose contents follow from what was recorded, by address, until they are gone."""
        self._in_part: dict[int, set[tuple[object, ...]]] = {}
        """Of these, the ones of which only some views were read: what lies between may be memory that nobody has written."""
        self._made: set[int] = set()
        """Of these, the ones that ops of this run made."""
        self._tainted: dict[int, Empty] = {}
        """Of these, the ones that were never written as a whole, and what made them."""
        self._kwargs: dict[str, Any] = {}
        self._given = EMPTY
        self.inputs: set[int] = set()
        """Storages that the op which runs was given."""
        self._overwritten: set[int] = set()
        """Of these, the ones whose numbers do not matter to the op that runs."""
        self._kept_count = 0
        """Elements that `resize_` keeps."""
        self._written: list[torch.Tensor] = []

    def begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> Plan | None:
        """None for an op of a forked worker, of compiled code, of another instrument, or of unpickling what a worker sent."""
        plan = plan_of(func)
        if self.has_failed or plan.base.startswith("profiler::") or getpid() != self._process:
            return None
        if _is_ours(caller) or _is_torchs_own(caller):
            return None
        self._look_at(plan, func, args, kwargs)
        return plan

    def failed(self, error: Exception) -> None:
        """Nothing is recorded from here on: a digest would be missing."""
        super().failed(error)
        self.has_failed = True

    def _look_at(self, plan: Plan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._kwargs = kwargs
        self._written = written_by(func, args, kwargs)
        for tensor in self._written:
            memory = memory_of(tensor)
            if self._keeps and memory and memory not in self._made:
                self.contents.keep(tensor)
                if memory not in self.writers and (line := self.lines.here(sys._getframe())) is not None:
                    self.writers[memory] = line
        self._given = EMPTY
        self.inputs.clear()
        self._overwritten.clear()
        if plan.is_collective:
            return
        if plan.is_overwriting:
            args, kwargs = self._without_overwritten(args, kwargs)
        elif plan.base in _RESIZING:
            self._kept_count = args[0].numel()
        for value in (*args, *kwargs.values()):
            self._take_in(value)

    def _without_overwritten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the op reads; what was in the memory that it writes is nothing that it was given."""
        for tensor in self._written:
            memory = memory_of(tensor)
            self._overwritten.add(memory)
            if memory not in self._known:
                self._meet(tensor, memory)
            elif memory in self._in_part:
                self._in_part[memory].add(view_of(tensor))
        is_written = {id(tensor) for tensor in self._written}
        if args and id(args[0]) in is_written:
            return args[1:], kwargs
        return args, {name: value for name, value in kwargs.items() if id(value) not in is_written}

    def _take_in(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            memory = memory_of(value)
            self.inputs.add(memory)
            if memory not in self._known or self.count == self._thorough_at:
                self._meet(value, memory)
                self._given = folded(self._given, of_tensor(value))
            elif (views := self._in_part.get(memory)) is not None and view_of(value) not in views:
                views.add(view_of(value))
                self._given = folded(self._given, of_tensor(value))
        elif isinstance(value, (list, tuple)):
            for one in value:
                self._take_in(one)
        elif not isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator)):
            self._given = folded(self._given, of_plain(value))

    def _meet(self, tensor: torch.Tensor, memory: int) -> None:
        if not memory:
            return
        storage = tensor.untyped_storage()
        if not self.recording.is_lent(storage, memory):
            self._know(storage, memory)
            if tensor.nbytes < storage.nbytes():
                self._in_part[memory] = {view_of(tensor)}

    def ends(self, plan: Plan, args: tuple[Any, ...], result: Any) -> None:
        """The op has run: it is digested."""
        line = self.lines.here(sys._getframe())
        results = list(tensors(result))
        empty = next((self._tainted[number] for number in self.inputs if number in self._tainted), None) if self._tainted else None
        for tensor in self._written if self._overwritten else ():
            memory = memory_of(tensor)
            if tensor.numel() * tensor.element_size() >= (tensor.untyped_storage().nbytes() if memory else 0):
                self._tainted.pop(memory, None)
        for tensor in results:
            memory = memory_of(tensor)
            if memory and memory not in self.inputs and memory not in self._overwritten and not (plan.is_view or plan.is_collective):
                self._know(tensor.untyped_storage(), memory)
                self._made.add(memory)
        for tensor in (*results, *tensors(args)) if plan.is_collective else ():
            self._forget(memory_of(tensor))  # what is in it then is read when the next op takes it
        kept_count = self._kept_count if plan.base in _RESIZING else 0
        if plan.is_empty and any(tensor.numel() > kept_count for tensor in results):
            gave = EMPTY
            for tensor in results:
                self._tainted[memory_of(tensor)] = Empty(plan, line)
                self._in_part.pop(memory_of(tensor), None)
                if self._poison and memory_of(tensor) and tensor.numel() and (not kept_count or tensor.is_contiguous()):
                    fill_otherwise(tensor.detach().view(-1)[kept_count:] if kept_count else tensor)
        else:
            gave = EMPTY if plan.is_view or plan.is_collective else self._digest(results, result)
        ops = self.recording.ops
        seen = Seen(ops.setdefault(plan.name, len(ops)), self.recording.number_of_line(line), self._given, gave)
        place, self.count = self.count, self.count + 1
        self.seen(Op(place, seen, plan, args, self._kwargs, line, result, self._written, empty))
        self.is_over = place >= self.until
        if self.is_over:
            raise Enough

    def seen(self, op: Op) -> None:
        """One more op: it is recorded, unless a subclass does otherwise."""
        self.recording.add(op.seen)

    def _digest(self, results: list[torch.Tensor], result: Any) -> int:
        """Without the bytes that an op keeps for its backward: scratch memory, of which a part is never written."""
        given = [tensor for tensor in results if tensor.dtype is not torch.uint8] or results or self._written
        return number_of(map(of_tensor, given)) if given else folded(EMPTY, of_plain(result))

    def is_unwritten(self, tensor: torch.Tensor) -> bool:
        """Whether it may hold memory that nobody has written."""
        return memory_of(tensor) in self._tainted

    def taint(self, op: Op) -> None:
        """What the op gave holds memory that nobody has written: it has only moved it."""
        assert op.empty is not None
        for tensor in (*tensors(op.result), *op.written):
            self._tainted.setdefault(memory_of(tensor), op.empty)

    def _know(self, storage: torch.UntypedStorage, memory: int) -> None:
        self._known[memory] = weakref.ref(storage, lambda _: self._forget(memory))

    def _forget(self, memory: int) -> None:
        self._known.pop(memory, None)
        self._in_part.pop(memory, None)
        self._made.discard(memory)
        self._tainted.pop(memory, None)


def _is_ours(frame: FrameType | None) -> bool:
    """Whether an op is called by this package itself, or by torch where a tensor comes from a worker: which worker is first, none can say.

    Who stands around a call of the user's, as around `backward()`, is no caller.
    """
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    if frame is None:
        return False
    name, above = frame.f_code.co_filename, frame.f_back
    if owner(name) == "own":
        return not name.replace("\\", "/").endswith(_CALL_THE_USERS)
    return name == torch._utils.__file__ and above is not None and above.f_code.co_filename == reductions.__file__


def _is_torchs_own(frame: FrameType | None) -> bool:
    """Whether an op is called by the compiler or inside what it has compiled, which is one piece, or to try how to shard another one."""
    if sys.modules.keys().isdisjoint({"torch._dynamo.convert_frame", "torch.distributed.tensor"}):
        return False
    inner = ""
    for one in frames_above(frame):
        file = one.f_code.co_filename.replace("\\", "/")
        if owner(one.f_code.co_filename) != "torch":
            return False
        # What torch only keeps from the compiler is called as ever.
        is_disabled = _DISABLED in one.f_code.co_qualname or (one.f_back is not None and one.f_back.f_code.co_filename == _COMPILE)
        is_compilers = any(part in file for part in _COMPILERS) and not (is_disabled and not any(part in inner for part in _COMPILED))
        if is_compilers or file.endswith(_SHARDING):
            return True
        inner = file
    return False


def fill_otherwise(tensor: torch.Tensor) -> None:
    """Torch fills with NaN, the largest integer and True, where it fills at all."""
    version = 0 if tensor.is_inference() else tensor._version
    with torch.no_grad():
        tensor.detach().fill_(False if tensor.dtype is torch.bool else 113)
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


class Printer(DigestRecorder):
    """Takes the fingerprint of the run, too."""

    def __init__(self, recording: Recording, guard: Guard, hooks: Hooks, *, keeps: bool) -> None:
        super().__init__(recording, guard, hooks, keeps=keeps)
        self._modules: dict[str, int] = {"": 0}
        self._calls = ModuleCalls((), hooks)
        self._records = bytearray()
        self._devices: set[str] = set()
        self._flow = array("I")
        self._makers: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Storage, by address, and the number of the op that made, wrote or first met what it holds."""
        self._updates: list[Update] = []
        self._files: dict[str, None] = {}
        """Those that the first op was called through."""

    def attach(self, stack: ExitStack, height: int | None = None) -> None:
        """Follow ops, the calls of modules and the steps of optimizers from here until the stack closes."""
        self._calls = ModuleCalls(live_modules(), self._hooks)
        self._calls.attach(stack)
        away_from_the_compiler(stack, self._hooks, self.guard)
        self._hooks.optimizer_steps(stack, self._before_update, self._after_update)
        super().attach(stack, height)

    def fingerprint(self) -> Fingerprint:
        """Of all ops so far."""
        places = [None if line is None else line.location for line in self.recording.places]
        files = (*self._files, *sorted({place.file for place in places if place is not None} - self._files.keys()))
        lines = (location(file, number, "") for file in files for number in range(1, len(linecache.getlines(file)) + 1))
        return Fingerprint(
            torch_version=torch.__version__,
            device=", ".join(sorted(self._devices - {"cpu"})) or "cpu",
            threads_count=torch.get_num_threads(),
            ops=tuple(self.recording.ops),
            places=tuple(places),
            modules=tuple(self._modules),
            records=bytes(self._records),
            flow=self._flow.tobytes(),
            updates=tuple(self._updates),
            code=tuple(line for line in lines if line.cell is not None and line.source),
        )

    def seen(self, op: Op) -> None:
        """One more op."""
        if self._keeps:
            super().seen(op)
        if not op.place:
            self._files = dict.fromkeys(frame.f_code.co_filename for frame in frames_above(sys._getframe(1)) if is_user_code(frame.f_code))
        running = self._calls.current
        module = self._modules.setdefault("" if running is None else running.path, len(self._modules))
        is_backward = torch._C._current_autograd_node() is not None
        bits = is_backward | op.plan.is_random << 1 | (op.empty is not None and op.plan.passes_on) << 2
        number, line, given, gave = op.seen
        self._records += RECORD.pack(number, line, module, bits, given, gave, *self._summary(op))
        self._follow(op)

    def _follow(self, op: Op) -> None:
        written = {id(tensor) for tensor in op.written}
        given: dict[int, None] = {}
        met = []
        for tensor in (*tensors(op.args), *tensors(tuple(op.kwargs.values()))):
            if (maker := self._maker(tensor)) is None:
                met.append(tensor)
            else:
                given[maker | OVERWRITTEN if op.plan.is_overwriting and id(tensor) in written else maker] = None
        self._flow.extend((len(given), *given))
        made = [tensor for tensor in tensors(op.result) if id(tensor) not in written and self._maker(tensor) is None]
        for tensor in (*met, *made, *op.written):
            if memory := memory_of(tensor):
                self._makers[memory] = weakref.ref(tensor.untyped_storage()), op.place

    def _maker(self, tensor: torch.Tensor) -> int | None:
        known = self._makers.get(memory_of(tensor))
        return known[1] if known is not None and known[0]() is tensor.untyped_storage() else None

    def _before_update(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        state: dict[str, Any] = next(iter(optimizer.state.values()), {})
        names = tuple(sorted(name for name, value in state.items() if value is not None and name != "step"))
        settings: dict[str, str] = {}
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, (bool, int, float)) or (isinstance(value, tuple) and all(isinstance(one, float) for one in value)):
                    settings[f"{name} of group {number}" if len(optimizer.param_groups) > 1 else name] = repr(value)
        self._updates.append(Update(self.count, self.count, type(optimizer).__name__, names, tuple(settings.items())))

    def _after_update(self, *_: object) -> None:
        if self._updates:
            self._updates[-1] = self._updates[-1]._replace(end=self.count)

    def _summary(self, op: Op) -> tuple[float, float]:
        if op.plan.is_view or op.plan.is_empty or op.plan.is_collective:
            return 0.0, 0.0
        total = magnitude = 0.0
        for tensor in tensors_in(op.result) if op.result is not None else op.written:
            self._devices.add(tensor.device.type)
            if tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_meta:
                plain: Any = tensor.detach()
                total += plain.sum(dtype=torch.float64).item()
                magnitude += plain.abs().sum(dtype=torch.float64).item()
        return total, magnitude if not math.isnan(total) else math.nan
