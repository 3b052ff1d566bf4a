"""Something moves, or will by itself: what takes the time."""

from __future__ import annotations

import ast
import os
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, duration
from torchdebug_magics.instruments.hangwatch.causes.stuck import DEBUGGERS, stopped
from torchdebug_magics.instruments.hangwatch.everybody.participants import Look, Participant, follow, goes_on, moving
from torchdebug_magics.instruments.hangwatch.everybody.rank_states import rank_states
from torchdebug_magics.instruments.hangwatch.hang_evidence import Cause, Evidence, Row, first
from torchdebug_magics.instruments.hangwatch.report import HangFinding
from torchdebug_magics.machine.limits import memory_pressure
from torchdebug_magics.probing.syntax import last_name, nodes, tree_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress


_MOST = 0.5
_STALLED = 0.2
_NEARLY_FULL = 0.95
_MUCH_SWAPPED_BYTES = 256 << 20
_SYNCHRONIZE = frozenset({"item", "cpu", "tolist", "numpy", "synchronize", "to"})


def slow(case: Evidence) -> HangFinding:
    """The first cause that applies; one without a name where only the line is known."""
    return first(_CAUSES, case) or case.found(None, _doing(case, case.root), state="slow")


def _main(case: Evidence) -> Participant:
    return case.main


def _memory(case: Evidence) -> HangFinding | None:
    pressure = memory_pressure()
    if pressure.stalled_ratio < _STALLED and not (pressure.used_ratio > _NEARLY_FULL and pressure.swapped_bytes > _MUCH_SWAPPED_BYTES):
        return None
    swapped = f", and {byte_size(pressure.swapped_bytes)} of this process is swapped out" if pressure.swapped_bytes else ""
    return case.found(
        "memory_pressure", f"memory is nearly full ({pressure.used_ratio:.0%} of the {pressure.whose}){swapped}",
        "use a smaller batch, or free memory: `%memclean` lists what can be freed, `%%memtrace` names what grows",
        f"processes stalled on memory for {pressure.stalled_ratio:.0%} of the last 10 s", case.main, "slow",
    )  # fmt: skip


def _on_network(case: Evidence) -> Participant | None:
    is_program = case.root.sleeps_in.startswith(("receive", "connect")) and not case.root.process
    return next((one for one in case.chain.path if one.facts.get("network")), case.root if is_program else None)


def _data(case: Evidence) -> HangFinding | None:
    batch = next((one for one in case.chain.path if one.kind == "batch"), None)
    if batch is None and not _mostly(case, "batch"):
        return None
    at, workers = (case.main, 0) if batch is None else (case.root, int(batch.facts.get("workers", 0)))
    begins = _initializer(at) if workers else ""
    what = "the Dataset computes a batch in the main thread" if batch is None else f"{at.name} computes {batch.what}"
    if begins:
        what = f"{at.name} runs `{begins}`, its `worker_init_fn`"
    elif at.kind == "sleep":
        what = f"{at.name} sleeps in the Dataset ({at.what})"
    enough = min(os.cpu_count() or 1, max(workers + 1, 2 * workers, 2))
    enough = max(enough, 2 * workers) if at.kind == "sleep" else enough  # who sleeps needs no core
    more = f"use `num_workers={enough}`" if enough > workers else "make `__getitem__` cheaper: more workers than cores do not help"
    made = sum(one.child is not None for one in case.look.everybody.values() if one.kind == "dead")
    keep = "keep the workers between epochs with `persistent_workers=True`"
    more = keep if begins else f"{more}; {keep}" if workers and made >= workers else more
    pinned = " and `pin_memory=True` for a GPU" if batch is not None and not batch.facts.get("pin_memory") and _has_gpu() else ""
    fix = f"{more}{pinned}; or preprocess the data once, before the loop"
    return case.found("data_loading", f"the loop waits for data: {what}", fix, at=at, state="slow")


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
    headline = kept if name else "each backward pass also traverses the graphs of earlier steps"
    found = case.found("growing_graph", headline, f"{fix} at the start of each step", at=case.main, state="slow")
    return replace(found, location=passes.carried_at or found.location)


def _oversubscribed(case: Evidence) -> HangFinding | None:
    busy = [one for one in case.look.everybody.values() if one.is_main_thread and one.process and case.moved.get(one.who)]
    threads = sum(one.process.get("torch_threads") or 1 for one in busy)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if len(busy) < 2 or threads <= 2 * cores:  # noqa: PLR2004 - a process by itself shares with nobody
        return None
    fix = f"call `torch.set_num_threads({max(1, cores // len(busy))})` at the top of each process"
    return case.found(
        "oversubscribed", f"{len(busy)} processes with {threads} threads share {cores} cores", fix, at=case.main, state="slow"
    )


def _doing(case: Evidence, one: Participant) -> str:
    who = one.name
    if one.kind == "sleep":
        return f"{who} sleeps in {one.what or 'a system call'}"
    if one.timeout_s is not None and one.facts.get("is_waiting"):
        return f"{who} waits for {one.a_what}, with a timeout of {duration(one.timeout_s)}"
    if one.facts.get("is_waiting"):
        return f"{who} waits for {one.a_what}"
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


_CAUSES: tuple[Cause, ...] = (
    Row("input_waiting", lambda _, one: one.kind == "input" and not one.is_child, "{who} waits for {what}", "type an answer under the cell",
        whom=_main, state="slow"),
    Row("compiling", lambda case, _: _mostly(case, "compiling"), "torch.compile is compiling",
        "wait: later steps run the compiled code; if every step recompiles, `TORCH_LOGS=recompiles` says why", whom=_main, state="slow"),
    _memory,
    Row("network", lambda *_: True,
        lambda _, one: f"{one.name} waits for " + (f"a response from {one.facts['host']}" if one.facts.get("host") else "the network"),
        lambda _, one: "call `settimeout(10)` on the socket" if one.what == "a socket" and not one.facts.get("host")
        else "set a timeout on the request; download once before the loop, and keep the file",
        whom=_on_network, state="slow"),
    _graph,
    Row("tracing", lambda case, _: case.progress.tracer, lambda case, _: "{} is on: {}".format(*case.progress.tracer or ("", "")),
        lambda case, _: (case.progress.tracer or ("", "", ""))[2], whom=_main, state="slow"),
    _data,
    Row("native_wait", lambda _, one: _has_gpu() and str(one.facts.get("calls", "")).rpartition(".")[2] in _SYNCHRONIZE,
        "`{calls}` waits for the GPU to finish earlier kernels",
        "read the loss only every n steps; the time is spent in kernels launched before this line", whom=_main, state="slow"),
    _oversubscribed,
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
    return first(DEBUGGERS, _evidence([look], progress, progress.still_s, Counter()))


def _evidence(looks: list[Look], progress: Progress, still_s: float, doing: Counter[str]) -> Evidence:
    moved = moving(looks) if len(looks) > 1 else {}
    return Evidence(looks, follow(looks[-1], moved, still_s), moved, rank_states(looks[-1]), progress, still_s, doing)
