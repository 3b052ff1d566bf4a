"""Something moves, or will by itself: what takes the time."""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, duration
from torchdebug_magics.instruments.hangwatch.causes.deaths import named, with_article
from torchdebug_magics.instruments.hangwatch.causes.stuck import debugger, stopped
from torchdebug_magics.instruments.hangwatch.everybody.participants import Look, Participant, follow, goes_on, moving
from torchdebug_magics.instruments.hangwatch.everybody.rank_states import rank_states
from torchdebug_magics.instruments.hangwatch.hang_evidence import Evidence
from torchdebug_magics.instruments.hangwatch.report import HangFinding
from torchdebug_magics.machine.limits import memory_pressure
from torchdebug_magics.probing.syntax import last_name, nodes, tree_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress


_MOST = 0.5
_STALLED = 0.2
_NEARLY_FULL = 0.95
_MUCH_SWAPPED_BYTES = 256 << 20


def slow(case: Evidence) -> HangFinding:
    """The first cause that applies; one without a name where only the line is known."""
    found = next(filter(None, (cause(case) for cause in _CAUSES)), None)
    if found is not None:
        return found
    return case.found("slow", None, _doing(case, case.root))


def _input(case: Evidence) -> HangFinding | None:
    if case.main.kind != "input" or case.main.is_child:
        return None
    return case.found("slow", "input_waiting", f"the main thread waits for {case.main.what}", "type an answer under the cell", at=case.main)


def _memory(case: Evidence) -> HangFinding | None:
    pressure = memory_pressure()
    if pressure.stalled_ratio < _STALLED and not (pressure.used_ratio > _NEARLY_FULL and pressure.swapped_bytes > _MUCH_SWAPPED_BYTES):
        return None
    swapped = f", and {byte_size(pressure.swapped_bytes)} of this process is swapped out" if pressure.swapped_bytes else ""
    return case.found(
        "slow", "memory_pressure", f"memory is nearly full ({pressure.used_ratio:.0%} of the {pressure.whose}){swapped}",
        "use a smaller batch, or free memory: `%memclean` lists what can be freed, `%%memtrace` names what grows",
        f"processes stalled on memory for {pressure.stalled_ratio:.0%} of the last 10 s", at=case.main,
    )  # fmt: skip


def _compiling(case: Evidence) -> HangFinding | None:
    if not _mostly(case, "compiling"):
        return None
    return case.found(
        "slow", "compiling", "torch.compile is compiling",
        "wait: later steps run the compiled code; if every step recompiles, `TORCH_LOGS=recompiles` says why", at=case.main,
    )  # fmt: skip


def _network(case: Evidence) -> HangFinding | None:
    one = next((one for one in case.chain.path if one.facts.get("network")), None)
    if one is None and case.root.sleeps_in.startswith(("receive", "connect")) and not case.root.process:
        one = case.root
    if one is None:
        return None
    host = one.facts.get("host")
    is_request = host or one.what != "a socket"
    fix = (
        "set a timeout on the request; download once before the loop, and keep the file"
        if is_request
        else "call `settimeout(10)` on the socket"
    )
    what = f"a response from {host}" if host else "the network"
    return case.found("slow", "network", f"{named(one.who)} waits for {what}", fix, at=one)


def _tracing(case: Evidence) -> HangFinding | None:
    tracer = case.progress.tracer
    if not tracer:
        return None
    what, price, repair = tracer
    return case.found("slow", "tracing", f"{what} is on: {price}", repair, at=case.main)


def _data(case: Evidence) -> HangFinding | None:
    batch = next((one for one in case.chain.path if one.kind == "batch"), None)
    single = case.doing["batch"] > _MOST * max(1, case.doing.total()) if batch is None else False
    if batch is None and not single:
        return None
    at = case.root if batch is not None else case.main
    workers = int(batch.facts.get("workers", 0)) if batch is not None else 0
    cores = os.cpu_count() or 1
    what = f"{named(at.who)} computes {batch.what}" if batch is not None else "the Dataset computes a batch in the main thread"
    if at.kind == "sleep":
        what = f"{named(at.who)} sleeps in the Dataset ({at.what})"
    begins = _initializer(at) if workers else ""
    what = f"{named(at.who)} runs `{begins}`, its `worker_init_fn`" if begins else what
    enough = min(cores, max(workers + 1, 2 * workers, 2))
    enough = max(enough, 2 * workers) if at.kind == "sleep" else enough
    more = f"use `num_workers={enough}`" if enough > workers else "make `__getitem__` cheaper: more workers than cores do not help"
    made = sum(one.child is not None for one in case.look.everybody.values() if one.kind == "dead")
    keep = "keep the workers between epochs with `persistent_workers=True`"
    more = keep if begins else f"{more}; {keep}" if workers and made >= workers else more
    pinned = " and `pin_memory=True` for a GPU" if batch is not None and not batch.facts.get("pin_memory") and _has_gpu() else ""
    return case.found(
        "slow", "data_loading", f"the loop waits for data: {what}", f"{more}{pinned}; or preprocess the data once, before the loop", at=at
    )


def _initializer(worker: Participant) -> str:
    """The function in which a worker stands, where a DataLoader was given it as ``worker_init_fn``."""
    for call in worker.stack:
        keywords = nodes(ast.keyword, tree_of(call.file))
        if any(one.arg == "worker_init_fn" and last_name(one.value) == call.function for one in keywords):
            return call.function
    return ""


def _graph(case: Evidence) -> HangFinding | None:
    passes = case.progress.passes
    if passes.carrier is None or not passes.began_s:
        return None
    name, fix = passes.carrier
    kept = f"`{name}` keeps the graphs of earlier steps, and each backward pass traverses them"
    found = case.found(
        "slow", "growing_graph", kept if name else "each backward pass also traverses the graphs of earlier steps",
        f"{fix} at the start of each step", at=case.main,
    )  # fmt: skip
    return replace(found, location=passes.carried_at or found.location)


def _oversubscribed(case: Evidence) -> HangFinding | None:
    busy = [one for one in case.look.everybody.values() if one.is_main_thread and one.process and case.moved.get(one.who)]
    threads = sum(one.process.get("torch_threads") or 1 for one in busy)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if len(busy) < 2 or threads <= 2 * cores:  # noqa: PLR2004 - a process by itself shares with nobody
        return None
    return case.found(
        "slow", "oversubscribed", f"{len(busy)} processes with {threads} threads share {cores} cores",
        f"call `torch.set_num_threads({max(1, cores // len(busy))})` at the top of each process", at=case.main,
    )  # fmt: skip


def _gpu(case: Evidence) -> HangFinding | None:
    called = str(case.main.facts.get("calls", ""))
    if not _has_gpu() or called.rpartition(".")[2] not in {"item", "cpu", "tolist", "numpy", "synchronize", "to"}:
        return None
    return case.found(
        "slow", "native_wait", f"`{called}` waits for the GPU to finish earlier kernels",
        "read the loss only every n steps; the time is spent in kernels launched before this line", at=case.main,
    )  # fmt: skip


def _doing(case: Evidence, one: Participant) -> str:
    who = named(one.who)
    if one.kind == "sleep":
        return f"{who} sleeps in {one.what or 'a system call'}"
    if one.timeout_s is not None and one.facts.get("is_waiting"):
        return f"{who} waits for {with_article(one.what)}, with a timeout of {duration(one.timeout_s)}"
    if one.facts.get("is_waiting"):
        return f"{who} waits for {with_article(one.what)}"
    if one.facts.get("does"):
        return f"{who} {one.facts['does']}"
    if one.facts.get("calls"):
        return f"{who} has been in `{one.facts['calls']}` for {duration(case.still_s)}"
    return f"{who} has computed for {duration(case.still_s)} without a step or output"


def _mostly(case: Evidence, what: str) -> bool:
    return case.doing[what] > _MOST * max(1, case.doing.total())


def _has_gpu() -> bool:
    import torch  # noqa: PLC0415 - a view of the causes needs none

    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())


_CAUSES: tuple[Callable[[Evidence], HangFinding | None], ...] = (
    _input, _compiling, _memory, _network, _graph, _tracing, _data, _gpu, _oversubscribed,
)  # fmt: skip


def judged(looks: list[Look], progress: Progress, still_s: float, doing: Counter[str]) -> HangFinding:
    """Why there was no progress for `still_s`."""
    case = _evidence(looks, progress, still_s, doing)
    if progress.passes.carrier is not None and progress.passes.began_s:
        return slow(case)
    if not goes_on(case.chain, case.moved, still_s) and (found := stopped(case)) is not None:
        return found
    return slow(case)


def debugger_now(look: Look, progress: Progress) -> HangFinding | None:
    """A prompt in another process needs no second look."""
    return debugger(_evidence([look], progress, progress.still_s, Counter()))


def _evidence(looks: list[Look], progress: Progress, still_s: float, doing: Counter[str]) -> Evidence:
    moved = moving(looks) if len(looks) > 1 else {}
    return Evidence(looks, follow(looks[-1], moved, still_s), moved, rank_states(looks[-1]), progress, still_s, doing)
