"""``%memclean``: look, free what was asked for, and measure what that gave back."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch

from torchdebug_magics.errors import refuse
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.memclean.report import Freed, Holding, MemcleanReport
from torchdebug_magics.machine.process import rss_bytes, trim_heap, trimmable_bytes
from torchdebug_magics.memory.cycles import cycles_of, waiting_cycles
from torchdebug_magics.memory.found import roots_of
from torchdebug_magics.memory.objects import storages_of
from torchdebug_magics.memory.paths import HolderPath
from torchdebug_magics.memory.walk import Rank, Walk, outputs, roots
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.names import named
from torchdebug_magics.probing.source.user_code import is_user_code, location, our_extension, running_shell
from torchdebug_magics.probing.state.attributes import undisturbed

_ALL = ("cycles", "exception", "debugger", "out", "session", "heap")
_NAMES = (*_ALL, "cache")
_ONE_OUTPUT = re.compile(r"Out\[(\d+)\]$")
_COSTS = {"exception": "`%debug` has no error to work on now", "out": "`Out` is empty now"}
_LAST = ("last_type", "last_value", "last_traceback", "last_exc")
_KEPT = ("tb", "etype", "evalue", "last_syntax_error")
_DEBUGGERS_FRAME = "__pdb_convenience_variables"
"""Where pdb keeps ``$_frame`` among the globals of the frame that it looked at, from Python 3.12 on."""
_OUTPUT = re.compile(r"_(\d+)$")
_LATEST = ("_", "__", "___")
_MOST_VISITS = 1_000_000
_MOST_OTHERS = 5
_NUMBERED = re.compile(r"(?:Out\[|_|user_ns_hidden\['_)(\d+)")
_PARTS = {Rank.ERROR: "exception", Rank.DEBUGGER: "debugger", Rank.OUTPUT: "out", Rank.SESSION: "session"}
_WHATS = {"debugger": "the closed debugger", "session": "the last torchdebug_magics session"}
_PRICES = {
    "exception": "`%debug` will no longer work on that error",
    "debugger": "the debugger will be discarded",
    "session": "`torchdebug_magics.last_session()` will be None",
}
_PASSES = 3
_BEYOND_THE_BUDGET = "not every object could be visited within the budget: some references may hold more than is shown here"


class _Held(NamedTuple):
    """One storage that the notebook holds; `others` are variables that hold it, too."""

    bytes: int
    device: str
    holders: frozenset[str]
    others: tuple[str, ...]


def examine(_: CellContext, *, free: str = "") -> MemcleanReport:
    """What is held, or, with `free`, what of it became free: ``"all"``, or names as in ``"exception,out"``."""
    asked, shell = _asked(free), running_shell()
    report, storages = survey()
    problems, freed = list(report.problems), []
    if asked:
        census = Census(storages)
        freed = [_freed(name, shell, census, problems) for name in asked]
        report = survey()[0]
    cycles_bytes, cycle = (0, "") if asked else Census(storages).by_cycle(waiting_cycles)
    return replace(
        report,
        cycles_bytes=cycles_bytes,
        cycle=cycle,
        heap_bytes=0 if asked else trimmable_bytes() or 0,
        freed=tuple(freed),
        asked=asked,
        rss_bytes=rss_bytes(),
        cache_bytes=cached_bytes() or 0,
        problems=tuple(problems),
    )


def _asked(free: str) -> tuple[str, ...]:
    """The names in the order in which they are freed: what the collector has waiting for it comes first, as it is nobody's."""
    words = free.replace(",", " ").split()
    for word in words:
        why = f"--free takes all, {', '.join(_NAMES)}, or an output such as Out[3], not {word!r}"
        refuse(word not in {"all", *_NAMES} and not _ONE_OUTPUT.match(word), why)
    if not words:
        return ()
    wanted = {*words, *(_ALL if "all" in words else ()), "cycles"}
    return (*(name for name in _NAMES if name in wanted), *dict.fromkeys(word for word in words if _ONE_OUTPUT.match(word)))


def _freed(name: str, shell: Any | None, census: Census, problems: list[str]) -> Freed:
    """Let go of one thing, collect, and see what is gone."""
    only = _ONE_OUTPUT.match(name)
    rss, cycle, given_back_bytes = rss_bytes(), "", None
    if only or name == "out":
        problems += forget_outputs(shell, int(only[1]) if only else None)
    elif name == "cycles":
        _, cycle = census.by_cycle(cycles_of)
    elif name == "heap":
        if not trim_heap():
            problems.append("this system's C library has no malloc_trim, so the heap was left as it is")
        given_back_bytes = max(0, rss - rss_bytes())
    elif name == "cache":
        kept_bytes = cached_bytes()
        if kept_bytes is None:
            problems.append("CUDA is not in use in this process, so there is no GPU cache to empty")
        else:
            torch.cuda.empty_cache()
            given_back_bytes = kept_bytes - (cached_bytes() or 0)
    else:
        {"exception": forget_error, "debugger": forget_debugger, "session": forget_session}[name](shell)
    for _ in range(_PASSES):  # a graph that was in a cycle may leave another one
        if not gc.collect():
            break
    gone_bytes = census.gone_bytes()
    return Freed(
        name=name,
        freed_bytes=given_back_bytes or 0 if name in {"heap", "cache"} else gone_bytes,
        rss_bytes=rss - rss_bytes(),
        cost=("" if not gone_bytes else f"`{name}` is gone now" if only else _COSTS.get(name, "")),
        cycle=cycle,
    )


def forget_error(shell: Any | None) -> None:
    """As if no cell had failed; `%debug` and `%tb` then say that there is no traceback."""
    for name in _LAST:
        if hasattr(sys, name):
            delattr(sys, name)
    for keeper in (getattr(shell, "InteractiveTB", None), getattr(shell, "SyntaxTB", None)):
        for name in _KEPT:
            if getattr(keeper, name, None) is not None:
                setattr(keeper, name, None)
    result = getattr(shell, "last_execution_result", None)
    if result is not None:
        result.error_in_exec = result.error_before_exec = None


def forget_debugger(shell: Any | None) -> None:
    """Drop the debugger, with the frame that it left in globals; IPython creates a new one at the next ``%debug``."""
    keeper: Any = getattr(shell, "InteractiveTB", None)
    if getattr(keeper, "pdb", None) is not None:
        keeper.pdb = None
        for module in tuple(sys.modules.values()):
            if isinstance(module, ModuleType):
                vars(module).pop(_DEBUGGERS_FRAME, None)


def forget_session(shell: Any | None) -> None:
    """The last session of one of our own magics, which keeps what it found for inspection."""
    extension = our_extension(shell)
    if extension is not None:
        extension.last_session = None


def forget_outputs(shell: Any | None, only: int | None) -> list[str]:
    """`Out`, and each other place where an output is known; a name that the user has given to something else stays. What was in the way."""
    if shell is None or (only is not None and only not in outputs(shell)):
        return ["no IPython runs here, so there are no outputs to free" if shell is None else f"there is no Out[{only}]"]
    held = outputs(shell)
    hidden = shell.user_ns_hidden
    values = [value for number, value in held.items() if only in {None, number}]
    values += [value for name, value in named(hidden) if (match := _OUTPUT.match(name)) and only in {None, int(match[1])}]
    for space in (shell.user_ns, hidden):
        for name in [name for name, value in named(space) if _OUTPUT.match(name) and _is_any(value, values)]:
            del space[name]
    hook = shell.displayhook
    for name in _LATEST:
        # Where the user gave the name to something else, neither of IPython's two is what stands there.
        latest = [one for one in (getattr(hook, name, ""), hidden.get(name, "")) if only is None or _is_any(one, values)]
        for space in (shell.user_ns, hidden):
            if name in space and _is_any(space[name], latest):
                space[name] = ""
        if _is_any(getattr(hook, name, ""), latest):
            setattr(hook, name, "")
    result = shell.last_execution_result
    if result is not None and (only is None or _is_any(result.result, values)):
        result.result = None
    for number in [number for number in held if only in {None, number}]:
        del held[number]
    return []


def _is_any(value: object, values: list[object]) -> bool:
    return any(value is one for one in values)


def cached_bytes() -> int | None:
    """What the CUDA allocator keeps to reuse; None where it is not in use. CUDA is not initialised for that."""
    if not torch.cuda.is_initialized():
        return None
    return sum(torch.cuda.memory_reserved(number) - torch.cuda.memory_allocated(number) for number in range(torch.cuda.device_count()))


def survey() -> tuple[MemcleanReport, list[weakref.ref[Any]]]:
    """What is held, and all storages that have a name, to be looked at again; nothing is changed."""
    refs: list[weakref.ref[Any]] = []
    helds: list[_Held] = []
    with undisturbed(), closing(Walk(roots(), None, _MOST_VISITS)) as walk:
        held_at, is_whole = roots_of(walk)
        names = _output_names(walk)
        for address, numbers in walk.holders.items():
            storage = next(storage for storage in storages_of(walk.objects[numbers[0]]) if storage._cdata == address)
            refs.append(weakref.ref(storage))
            known = held_at[address]
            holders = frozenset(names.get(root.label, _PARTS[root.rank]) for root in known if root.rank in _PARTS)
            others = tuple(root.label for root in known if root.rank not in _PARTS)
            if holders:
                helds.append(_Held(size_of(storage), str(storage.device), holders, others))
    freed = [one for one in helds if not one.others]
    by_part: Counter[str] = Counter()
    for one in freed:
        if len(parts := {_part(name) for name in one.holders}) == 1:
            by_part[parts.pop()] += one.bytes
    holdings = [_holding(name, [one for one in helds if name in one.holders]) for name in {name for one in helds for name in one.holders}]
    report = MemcleanReport(
        holdings=tuple(sorted(holdings, key=lambda holding: (-holding.alone_bytes, -holding.held_bytes, holding.name))),
        together_bytes=sum(one.bytes for one in freed),
        by_part=dict(by_part),
        problems=() if is_whole else (_BEYOND_THE_BUDGET,),
    )
    return report, refs


def _part(name: str) -> str:
    return name if name in _PARTS.values() else "out"


def _output_names(walk: Walk) -> dict[str, str]:
    """``_3``, ``_`` and their like are names of the same output: ``Out[3]``."""
    names: dict[str, str] = {}
    for found in walk.roots.values():
        outputs = [root.label for root in found if root.rank is Rank.OUTPUT]
        numbers = [match[1] for match in map(_NUMBERED.match, outputs) if match]
        names.update(dict.fromkeys(outputs, f"Out[{numbers[0]}]" if numbers else "_"))
    return names


def _holding(name: str, held: list[_Held]) -> Holding:
    part = _part(name)
    return Holding(
        name=name,
        part=part,
        what=_error() if part == "exception" else _WHATS.get(part, f"`{name}`"),
        held_bytes=sum(one.bytes for one in held),
        alone_bytes=sum(one.bytes for one in held if len(one.holders) == 1 and not one.others),
        devices=tuple(sorted({one.device for one in held})),
        cost=_PRICES.get(part, f"`{name}` will be gone"),
        others=tuple(dict.fromkeys(label for one in held for label in one.others))[:_MOST_OTHERS],
    )


def _error() -> str:
    """The last error, by the cell or the line of the user's in which it began."""
    trace = getattr(sys, "last_traceback", None)
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_user_code(code):
            where = location(code.co_filename, trace.tb_lineno, code.co_name)
            return f"the error of {f'In[{where.cell}]' if where.cell is not None else where}"
        trace = trace.tb_next
    return "an old error"


class Census:
    """All storages that are there now, without holding them."""

    def __init__(self, known: Iterable[weakref.ref[Any]] = ()) -> None:
        refs = {storage._cdata: (one, size_of(storage)) for one in known if (storage := one()) is not None}
        with undisturbed():
            for tensor in live(torch.Tensor):
                for storage in storages_of(tensor):
                    refs.setdefault(storage._cdata, (weakref.ref(storage), size_of(storage)))
        self._known = refs

    def gone_bytes(self) -> int:
        """Of those that are gone since this was last asked."""
        gone = [address for address, (ref, _) in self._known.items() if ref() is None]
        return sum(self._known.pop(address)[1] for address in gone)

    def by_cycle(self, look: Callable[[Iterable[weakref.ref[Any]]], dict[int, HolderPath]]) -> tuple[int, str]:
        """(bytes that hold themselves, the cycle of references by which the most does so); `look` finds them, and may collect."""
        sizes: Counter[str] = Counter()
        for address, path in look([ref for ref, _ in self._known.values()]).items():
            sizes[path] += self._known[address][1]
        return sizes.total(), max(sizes, key=lambda path: sizes[path], default="")


def size_of(storage: torch.UntypedStorage) -> int:
    """Its bytes; none of one that has no memory."""
    return 0 if storage.device.type == "meta" else storage.nbytes()
