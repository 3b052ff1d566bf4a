"""The limit that binds, on systems made of files: cgroup v1, v2, both, nested, in a container, and none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import children
from torchdebug_magics.machine import gpus, limits
from torchdebug_magics.machine.limits import Limit, MemoryPressure, binding_limit, memory_pressure, smallest_limit
from torchdebug_magics.machine.process import rss_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Write = Callable[[dict[str, str]], Path]

GIB = 2**30
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
UNIFIED = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
HOST = {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {48 * GIB // 1024} kB\n", "proc/vmstat": "x 1\noom_kill 3\n"}


def v1(folder: str, limit: object, used: int) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory{folder}"
    return {f"{at}/memory.limit_in_bytes": f"{limit}\n", f"{at}/memory.usage_in_bytes": f"{used}\n"}


def v2(folder: str, limit: object, used: int) -> dict[str, str]:
    at = f"sys/fs/cgroup{folder}"
    return {f"{at}/memory.max": f"{limit}\n", f"{at}/memory.current": f"{used}\n"}


SYSTEMS = {
    "docker, version 2": (
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2,
            **v2("", 2 * GIB, GIB),
            "sys/fs/cgroup/memory.stat": f"anon 5\nfile {GIB // 2}\ninactive_file {GIB // 4}\n",
            "sys/fs/cgroup/memory.events": "low 0\noom 1\noom_kill 4\n",
        },
        Limit(2 * GIB, GIB, GIB * 3 // 4, "container limit", 4),
    ),
    "docker, version 2, the host's path": (
        {"proc/self/cgroup": "0::/../x\n", "proc/self/mountinfo": V2, **v2("", 2 * GIB, GIB)},
        Limit(2 * GIB, GIB, None, "container limit"),
    ),
    "docker, version 1: the mount begins at our group": (
        {
            "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n",
            "proc/self/mountinfo": CPU + V1.format(root="/docker/abc"),
            **v1("", GIB, GIB // 2),
            "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 7\ntotal_inactive_file 100\n",
        },
        Limit(GIB, GIB // 2, GIB // 2 - 100, "container limit", 2),
    ),
    "version 1, controllers together": (
        {
            "proc/self/cgroup": "4:cpu,memory:/a\n",
            "proc/self/mountinfo": V1.format(root="/").replace("rw,memory", "rw,cpu,memory"),
            **v1("/a", GIB, 5),
        },
        Limit(GIB, 5, None, "container limit"),
    ),
    "nested, version 2: the job's limit, not the step's": (
        {
            "proc/self/cgroup": "0::/slurm/job_1/step_0\n",
            "proc/self/mountinfo": V2,
            **v2("/slurm/job_1/step_0", "max", 7),
            **v2("/slurm/job_1", 3 * GIB, GIB),
        },
        Limit(3 * GIB, GIB, None, "container limit"),
    ),
    "nested: the outer limit is larger, and nearly used up by others": (
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "proc/self/mountinfo": V2,
            **v2("/pod/box", 8 * GIB, GIB),
            **v2("/pod", 16 * GIB, 15 * GIB),
        },
        Limit(16 * GIB, 15 * GIB, None, "container limit"),
    ),
    "nested, version 1": (
        {"proc/self/cgroup": "4:memory:/a/b\n", "proc/self/mountinfo": V1.format(root="/"), **v1("/a/b", 1 << 63, 7), **v1("/a", GIB, 9)},
        Limit(GIB, 9, None, "container limit"),
    ),
    "hybrid: version 2 is mounted, version 1 counts memory": (
        {
            "proc/self/cgroup": "4:memory:/x\n0::/x\n",
            "proc/self/mountinfo": V1.format(root="/") + UNIFIED,
            **v1("/x", GIB, 5),
            "sys/fs/cgroup/unified/x/cgroup.procs": "1\n",
        },
        Limit(GIB, 5, None, "container limit"),
    ),
    "a folder with a blank in its name": (
        {"proc/self/cgroup": "0::/a b\n", "proc/self/mountinfo": V2.replace("cgroup rw", "my\\040cgroup rw"), **v2("", 1, 1)}
        | {"sys/fs/my cgroup/a b/memory.max": f"{GIB}", "sys/fs/my cgroup/a b/memory.current": "6"},
        Limit(GIB, 6, None, "container limit"),
    ),
    "version 1 without a limit": (
        {"proc/self/cgroup": "4:memory:/\n", "proc/self/mountinfo": V1.format(root="/"), **v1("", 9223372036854771712, 5)},
        Limit(64 * GIB, 16 * GIB, None, "the whole machine", 3),
    ),
    "version 2 without a limit": (
        {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2, **v2("", "max", 5)},
        Limit(64 * GIB, 16 * GIB, None, "the whole machine", 3),
    ),
    "no control groups": ({}, Limit(64 * GIB, 16 * GIB, None, "the whole machine", 3)),
}


@pytest.fixture(autouse=True)
def no_limits_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_address_space", lambda: iter([]))
    monkeypatch.delenv("MEM_LIMIT", raising=False)


@pytest.mark.parametrize(("files", "expected"), SYSTEMS.values(), ids=SYSTEMS)
def test_the_limit_that_binds(system: Write, files: dict[str, str], expected: Limit):
    assert binding_limit(system({**HOST, **files})) == expected


def test_a_machine_that_others_have_filled_binds_before_the_container(system: Write):
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2, **v2("", 16 * GIB, GIB)}
    root = system({**files, "proc/meminfo": f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {2 * GIB // 1024} kB\n"})
    binding, smallest = binding_limit(root), smallest_limit(root)
    assert binding is not None
    assert (binding.whose, binding.left_bytes) == ("the whole machine", 2 * GIB)
    assert smallest is not None
    assert smallest.whose == "container limit"
    assert gpus.memory_limit(root) == "16.0 GiB (container limit)"


def test_file_cache_is_no_reason_to_be_killed(system: Write):
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2, **v2("", 4 * GIB, 4 * GIB)}
    binding = binding_limit(system({**HOST, **files, "sys/fs/cgroup/memory.stat": f"inactive_file {3 * GIB}\n"}))
    assert binding is not None
    assert binding.left_bytes == 3 * GIB


def test_what_jupyterhub_promised(system: Write, monkeypatch: pytest.MonkeyPatch):
    root = system(HOST)
    monkeypatch.setenv("MEM_LIMIT", str(2 * GIB))
    found = binding_limit(root)
    assert found is not None
    assert (found.limit_bytes, found.whose) == (2 * GIB, "MEM_LIMIT of this server")
    assert abs(found.used_bytes - rss_bytes()) < 64 << 20
    for nonsense in ("", "0", "2G"):
        monkeypatch.setenv("MEM_LIMIT", nonsense)
        found = binding_limit(root)
        assert found is not None
        assert found.whose == "the whole machine"


def test_the_address_space_of_this_process_counts_addresses():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from torchdebug_magics.machine.limits import binding_limit; found = binding_limit(); print(found.whose, found.limit_bytes)\n"
        "assert 0 < found.used_bytes < 1 << 30"
    )
    assert children.python("-c", code, MEM_LIMIT="").split("\n")[0] == f"address space limit of this process {1 << 30}"


def test_this_machine_has_one():
    found = binding_limit()
    assert found is not None
    assert 0 < found.used_bytes < found.limit_bytes


GROUP, HOST_TEXT, STATUS = "/sys/fs/cgroup/memory.pressure", "/proc/pressure/memory", "/proc/self/status"
STALLED = "some avg10={} avg60=1.00 avg300=0.00 total=9\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=3"
LIMIT = Limit(1000, 950, None, "container limit")

PRESSED = {
    "quiet": ({GROUP: STALLED.format("0.00"), STATUS: "VmRSS:\t  9 kB\nVmSwap:\t       0 kB"}, LIMIT, (0.0, 0, 0.95, "container limit")),
    "the group waits": ({GROUP: STALLED.format("34.50"), HOST_TEXT: STALLED.format("1.00")}, LIMIT, (0.345, 0, 0.95, "container limit")),
    "the host waits": ({GROUP: STALLED.format("1.00"), HOST_TEXT: STALLED.format("20.00")}, LIMIT, (0.2, 0, 0.95, "container limit")),
    "swapped": ({STATUS: "VmSwap:\t    2048 kB\nThreads:\t1"}, None, (0.0, 2 << 20, 0.0, "")),
    "not told": ({}, None, (0.0, 0, 0.0, "")),
    "turned off": ({HOST_TEXT: "", GROUP: "error"}, LIMIT, (0.0, 0, 0.95, "container limit")),
}


@pytest.mark.parametrize("system", PRESSED)
def test_of_a_system(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files, limit, said = PRESSED[system]
    monkeypatch.setattr(limits, "read", files.get)
    monkeypatch.setattr(limits, "binding_limit", lambda: limit)
    found = memory_pressure()
    assert (found.stalled_ratio, found.swapped_bytes, found.used_ratio, found.whose) == (
        pytest.approx(said[0]), said[1], pytest.approx(said[2]), said[3],
    )  # fmt: skip


def test_of_this_one() -> None:
    found = memory_pressure()
    assert isinstance(found, MemoryPressure)
    assert 0 <= found.stalled_ratio <= 1
    assert 0 <= found.used_ratio <= 1
