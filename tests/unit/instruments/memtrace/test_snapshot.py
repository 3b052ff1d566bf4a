"""The snapshot: read by torch's own reader, its bytes those of the report, one file a rank, whole or not there."""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.cuda import _memory_viz as viz

import torchdebug_magics
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.memtrace.ledger.memory_snapshot import rank_path

if TYPE_CHECKING:
    from tests.doors import Observe

MIB = 2**20
TRAIN = """\
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))
optimizer = torch.optim.Adam(net.parameters())
for _ in range(3):
    loss = net(torch.randn(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
before.resize_(0)
del before
empty = torch.zeros(0)
"""


def held(taken: dict[str, Any]) -> int:
    return sum(block["size"] for one in taken["segments"] for block in one["blocks"] if block["state"] == "active_allocated")


def replayed(taken: dict[str, Any]) -> tuple[int, int]:
    """(bytes at the end, at the peak), as a reader of the file finds them; no address is used twice at once."""
    alive: dict[int, int] = {}
    known = {event["addr"] for event in taken["device_traces"][0] if event["action"] == "alloc"}
    first: dict[int, str] = {}
    for event in taken["device_traces"][0]:
        first.setdefault(event["addr"], event["action"])
    for event in taken["device_traces"][0]:
        if event["action"] == "free_requested" and first[event["addr"]] == "free_requested":
            alive.setdefault(event["addr"], event["size"])  # there from the start
    for one in taken["segments"]:
        for block in one["blocks"]:
            if block["state"] == "active_allocated" and block["address"] not in known and block["address"] not in first:
                alive[block["address"]] = block["size"]
    total = peak = sum(alive.values())
    for event in taken["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in alive
            alive[event["addr"]] = event["size"]
            total += event["size"]
        elif event["action"] == "free_completed":
            assert alive.pop(event["addr"]) == event["size"]
            total -= event["size"]
        peak = max(peak, total)
    spans = sorted(alive.items())
    assert all(start + size <= following for (start, size), (following, _) in pairwise(spans))
    return total, peak


def test_torch_reads_it_and_its_bytes_are_the_reports(observe: Observe, tmp_path: Path):
    file = tmp_path / "mem.pickle"
    observed = observe("memtrace", TRAIN, namespace={"before": torch.zeros(1 << 20)}, snapshot=file)
    report = observed.report
    assert (observed.error, report.problems, report.snapshot) == (None, (), str(file))
    taken = pickle.loads(file.read_bytes())
    total, peak = replayed(taken)
    assert total == held(taken) == report.start_bytes + report.net_bytes
    assert peak == report.peak_bytes
    assert "total_allocated:" in viz.segsum(taken)
    assert "Device 0" in viz.trace(taken)
    assert "snapshot.pickle" in viz.trace_plot(taken)
    assert [path.name for path in tmp_path.iterdir() if "pickle" in path.name] == ["mem.pickle"]


def test_events_name_the_users_line_the_module_and_the_category(observe: Observe, tmp_path: Path):
    file = tmp_path / "mem.pickle"
    observe("memtrace", TRAIN, namespace={"before": torch.zeros(1)}, snapshot=file)
    events = pickle.loads(file.read_bytes())["device_traces"][0]
    found = defaultdict(set)
    for event in events:
        if event["action"] == "alloc":
            found[event["category"]].add(tuple((frame["filename"], frame["line"], frame["name"]) for frame in event["frames"]))
    where = next(one for one in found["activation"] if len(one) == 2)
    assert re.search(r"In\[\d+\]|script_\d+\.py", where[0][0])
    assert where[0][1] == 7
    assert where[1] in {("none", 0, "0"), ("none", 0, "1"), ("none", 0, "2")}
    assert {"activation", "gradient", "optimizer_state", "parameter"} <= set(found)
    assert (events[-1]["action"], events[-1]["category"]) == ("snapshot", "unknown")  # without which the page of memory_viz shows nothing


def test_after_an_error_it_is_there_too(observe: Observe, tmp_path: Path):
    file = tmp_path / "mem.pickle"
    observed = observe("memtrace", "import torch\nx = torch.zeros(1 << 18)\n1 / 0", snapshot=file)
    assert isinstance(observed.error, ZeroDivisionError)
    assert any(event["size"] == MIB for event in pickle.loads(file.read_bytes())["device_traces"][0])


def test_a_file_that_cannot_be_written_is_a_line_and_the_old_one_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "mem.pickle"
    file.write_bytes(b"old")

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pickle, "dump", fails)
    with torchdebug_magics.memtrace(snapshot=file) as session:
        done = True
    assert done
    assert session.report.snapshot == ""
    assert any("writing the snapshot failed: OSError: disk full" in problem for problem in session.report.problems)
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_is_not_there_is_said_before_anything_runs(tmp_path: Path):
    with pytest.raises(TorchDebugError, match="its folder is not there"):
        torchdebug_magics.memtrace(snapshot=tmp_path / "no" / "mem.pickle")
    with pytest.raises(TorchDebugError, match="it is a folder"):
        torchdebug_magics.memtrace(snapshot=tmp_path)


@pytest.mark.parametrize(
    ("name", "environment", "expected"),
    [
        ("mem.pickle", {}, "mem.pickle"),
        ("mem_{rank}.pickle", {}, "mem_0.pickle"),
        ("mem_{rank}.pickle", {"RANK": "3", "WORLD_SIZE": "4"}, "mem_3.pickle"),
        ("mem.pickle", {"RANK": "3", "WORLD_SIZE": "4"}, "mem_3.pickle"),
        ("mem.pickle", {"RANK": "0", "WORLD_SIZE": "1"}, "mem.pickle"),
        ("mem.pickle", {"RANK": "0", "WORLD_SIZE": "4"}, "mem_0.pickle"),
    ],
)
def test_each_rank_has_a_file(monkeypatch: pytest.MonkeyPatch, name: str, environment: dict[str, str], expected: str):
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert rank_path(Path("out") / name) == Path("out") / expected


def test_a_group_that_has_begun_knows_better_than_the_launcher(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    for name, value in (("is_initialized", True), ("get_rank", 5), ("get_world_size", 8)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    assert rank_path(Path("mem.pickle")) == Path("mem_5.pickle")


# CUDA ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """CUDA in use, as far as the snapshot asks for it; says whether anybody records, and what was called."""
    state = SimpleNamespace(initialized=True, recording=False, calls=[])

    def record(enabled: str | None = "all", **options: object) -> None:
        state.calls.append((enabled, options.get("stacks")))
        state.recording = enabled is not None

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: state.initialized)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: state.recording, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"by": "cuda", "recording": state.recording})
    return state


def test_cudas_own_history_is_recorded_written_and_ended(cuda: SimpleNamespace, tmp_path: Path):
    with torchdebug_magics.memtrace(snapshot=tmp_path / "mem.pickle"):
        assert cuda.recording
    assert pickle.loads((tmp_path / "mem.pickle").read_bytes()) == {"by": "cuda", "recording": True}
    assert cuda.calls == [("all", "python"), (None, None)]


def test_who_records_already_goes_on(cuda: SimpleNamespace, tmp_path: Path):
    cuda.recording = True
    with torchdebug_magics.memtrace(snapshot=tmp_path / "mem.pickle"):
        pass
    assert (cuda.recording, cuda.calls) == (True, [])


def test_cuda_that_begins_in_the_cell_has_no_history_and_that_is_said(cuda: SimpleNamespace, tmp_path: Path):
    cuda.initialized = False
    with torchdebug_magics.memtrace(snapshot=tmp_path / "mem.pickle") as session:
        cuda.initialized = True
    assert any("no history" in problem for problem in session.report.problems)
    assert cuda.calls == []


def test_recording_ends_when_attaching_fails(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("torchdebug_magics.memory.gauges.GaugedProbe.begin", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torchdebug_magics.memtrace(snapshot=tmp_path / "mem.pickle"):
        pass
    assert not cuda.recording
