"""Time `%%hangwatch`: while nothing hangs, from a hang to the verdict, and the start of a process; ``python -m tests.bench.hangwatch``.

`hanging_threads` is timed too where it is installed. It prints, and never fails on a figure.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import faulthandler
import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in {None, ""}:  # `python tests/bench/hangwatch.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils.data import DataLoader, Dataset

import torchdebug_magics
from tests.bench import measure
from tests.bench.models import WORKLOADS
from tests.bench.rivals import Contender, nothing, off
from tests.bench.run import hush_transformers, print_costs
from torchdebug_magics.format import duration

if TYPE_CHECKING:
    from tests.bench.models import Training

AFTER_S = 2.0
BLOCKS = {"gpt2": 6, "cnn": 48, "mlp": 900}
"""Steps timed in one go: about two seconds, so that several looks of a watch fall into each."""
MOST_ROUNDS = 16
ASKED_RATIO, ASKED_BEYOND_S, ASKED_START_S = 1.01, 3.0, 0.05
_LONGEST_S = 60.0
_HERE = "tests.bench.hangwatch"


# --- while nothing hangs -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hanging_threads(_training: Training) -> Iterator[None]:
    import hanging_threads

    thread = hanging_threads.start_monitoring(seconds_frozen=10, test_interval=100)
    try:
        yield
    finally:
        thread.stop()
        thread.join()


@contextlib.contextmanager
def _settrace(_training: Training) -> Iterator[None]:
    """A tracer of every line, as a debugger has, which does nothing with it."""

    def trace(_frame: object, _event: str, _arg: object) -> Any:
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def _dump_later(_training: Training) -> Iterator[None]:
    with Path(os.devnull).open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback_later(10, repeat=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


CONTENDERS = (
    Contender("plain", nothing, off),
    Contender("hangwatch", nothing, lambda _: torchdebug_magics.hangwatch()),
    Contender("hanging_threads", nothing, _hanging_threads),
    Contender("faulthandler.dump_traceback_later", nothing, _dump_later),
    Contender("sys.settrace, does nothing", nothing, _settrace),
)


def _costs(names: Sequence[str], *, quick: bool) -> None:
    contenders = CONTENDERS
    if importlib.util.find_spec("hanging_threads") is None:
        contenders = tuple(one for one in CONTENDERS if one.name != "hanging_threads")
        print("hanging_threads is not installed here")
    for workload in WORKLOADS:
        if names and workload.name not in names:
            continue
        print(f"\n{workload.title}", flush=True)
        rounds = max(3, workload.rounds // 4) if quick else min(workload.rounds, MOST_ROUNDS)
        longer = replace(workload, block=BLOCKS[workload.name])
        print_costs(measure.costs(longer, torch.device("cpu"), rounds, contenders), {"hangwatch": ASKED_RATIO})


# --- from a hang to the verdict ------------------------------------------------------------------------------------------------------


def _stamp(notes: str) -> None:
    """The time, of all processes: the latest is that of the hang."""
    with Path(notes).open("a", encoding="utf-8") as file:
        file.write(f"{time.monotonic()}\n")


class _LocksItselfOut(Dataset[torch.Tensor]):
    """Each of four workers comes to its own third row, and then waits for a lock that it holds."""

    def __init__(self, notes: str) -> None:
        self.lock = threading.Lock()
        self.notes = notes

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index < 8:
            return torch.zeros(4)
        with self.lock:
            _stamp(self.notes)
            with self.lock:
                return torch.ones(4)


def _loader(notes: str) -> None:
    for _batch in DataLoader(_LocksItselfOut(notes), batch_size=1, num_workers=4):
        _stamp(notes)


def _rank(rank: int, port: int, notes: str) -> None:
    import torch.distributed as dist

    limit = dt.timedelta(seconds=2 * _LONGEST_S)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=limit)
    loss = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(loss)
    _stamp(notes)
    if rank == 0:
        dist.all_reduce(loss, op=dist.ReduceOp.MAX)
    else:
        dist.all_gather([torch.empty(4), torch.empty(4)], loss)


def _ranks(notes: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [multiprocessing.get_context("fork").Process(target=_rank, args=(rank, port, notes)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


HANGS: dict[str, tuple[str, Callable[[str], None]]] = {
    "loader": ("DataLoader, 4 workers, each locked out by itself", _loader),
    "ranks": ("2 gloo ranks, all_reduce against all_gather", _ranks),
}


def hang_here(name: str, notes: str) -> None:
    """Hang, and print when the live view could say why; asked in a process made for it."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background ignore it
    seen: dict[str, Any] = {}
    session = torchdebug_magics.hangwatch(after=AFTER_S)

    def wait_for_it() -> None:
        end_s = time.monotonic() + _LONGEST_S
        while time.monotonic() < end_s and not seen:
            finding = getattr(session.live(), "finding", None)
            if finding is not None and finding.state == "stuck":
                seen.update(at_s=time.monotonic(), cause=finding.cause)
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with contextlib.suppress(KeyboardInterrupt), session:
        threading.Thread(target=wait_for_it, name="stopwatch", daemon=True).start()
        HANGS[name][1](notes)
    hung_s = max(map(float, Path(notes).read_text(encoding="utf-8").split()))
    print(json.dumps({"beyond_s": seen["at_s"] - hung_s - AFTER_S if seen else None, "cause": seen.get("cause")}))


def _verdicts(times: int) -> None:
    print(f"from the hang to the verdict, beyond --after {AFTER_S:g}")
    for name, (title, _) in HANGS.items():
        answers = []
        for _ in range(times):
            with tempfile.TemporaryDirectory() as folder:
                answers.append(_asked_of_a_process(f"hang_here({name!r}, {str(Path(folder, 'notes'))!r})"))
        taken = [one["beyond_s"] for one in answers if one["beyond_s"] is not None]
        causes = ", ".join(sorted({str(one["cause"]) for one in answers}))
        if len(taken) < times:
            print(f"  {title}: no verdict within {_LONGEST_S:g} s in {times - len(taken)} of {times}")
        if taken:
            print(f"  {title}: {_spread(taken)} (asked: at most {duration(ASKED_BEYOND_S)}); cause {causes}", flush=True)


# --- the start of a process ----------------------------------------------------------------------------------------------------------


def _started(method: str) -> tuple[float, float]:
    """Seconds of `start()`, and until the process runs its function."""
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=theirs.send_bytes, args=(b"it runs",))
    began_s = time.perf_counter()
    process.start()
    started_s = time.perf_counter()
    ours.recv_bytes()
    runs_s = time.perf_counter()
    process.join()
    process.close()
    ours.close()
    theirs.close()
    return started_s - began_s, runs_s - began_s


def starts_here(method: str, rounds: int) -> None:
    """Start processes, with and without a session in turn, and print how long each took; asked in a process made for it."""
    torch.set_num_threads(1)
    _started(method)
    plain, watched = [], []
    for number in range(rounds):
        for is_watched in (False, True) if number % 2 else (True, False):
            with torchdebug_magics.hangwatch() if is_watched else contextlib.nullcontext():
                (watched if is_watched else plain).append(_started(method))
    print(json.dumps({"plain": plain, "watched": watched}))


def _starts(rounds: int) -> None:
    print(f"\na process begins later, with a session open (asked: at most {duration(ASKED_START_S)})")
    for method in ("fork", "spawn"):
        answer = _asked_of_a_process(f"starts_here({method!r}, {rounds})")
        for place, what in enumerate(("start() returns", "its function runs")):
            plain = [one[place] for one in answer["plain"]]
            more = [one[place] - other for one, other in zip(answer["watched"], plain, strict=True)]
            print(f"  {method:6} {what:18} {_spread(more)}; without: {duration(statistics.median(plain))}", flush=True)


# --- small things --------------------------------------------------------------------------------------------------------------------


def _asked_of_a_process(call: str) -> Any:
    """Of one whose ``__main__`` is no file, as that of a kernel: a process that it spawns imports just what it needs."""
    command = [sys.executable, "-c", f"import {_HERE} as bench; bench.{call}"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=600, check=False)
    if answer.returncode:
        sys.exit(answer.stderr)
    return json.loads(answer.stdout.splitlines()[-1])


def _spread(values_s: Sequence[float]) -> str:
    spread = measure.Spread.of(values_s)
    return f"{_signed(spread.median)} ({_signed(spread.low)} to {_signed(spread.high)}; at most {_signed(max(values_s))})"


def _signed(seconds_s: float) -> str:
    return f"{seconds_s:+.2f} s" if abs(seconds_s) >= 0.5 else f"{seconds_s * 1e3:+.1f} ms"


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    quick, names = "--quick" in given, [one for one in given if not one.startswith("-")]
    torch.set_num_threads(1)
    hush_transformers()
    print(f"torch {torch.__version__}, CPU ({os.cpu_count()} cores), load {os.getloadavg()[0]:.1f}")
    _costs(names, quick=quick)
    _verdicts(3 if quick else 7)
    _starts(8 if quick else 20)


if __name__ == "__main__":
    main()
