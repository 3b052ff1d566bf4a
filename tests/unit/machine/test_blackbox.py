"""What a killed process leaves behind, and what the next one makes of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests import children
from torchdebug_magics.machine.blackbox import BlackBox, Entry, last_words

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GIB = 2**30
MIB = 2**20
ENTRY = Entry("In[7] line 12", 14 * GIB, 148 * GIB // 10, 15 * GIB, "container limit", 310 * MIB, 4)
CGROUP = {
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "sys/fs/cgroup/memory.max": f"{15 * GIB}\n",
    "sys/fs/cgroup/memory.current": f"{GIB}\n",
}

# Writes one entry and says so; then it waits to be killed.
WRITER = """
import sys, time
from pathlib import Path
from torchdebug_magics.machine.blackbox import BlackBox, Entry
with BlackBox(Path(sys.argv[1])) as box:
    box.write(Entry("In[1] line 1", 1, 1, 99, "a longer name that the second entry does not fill", 0, None))
    box.write(Entry("In[7] line 12", 95, 95, 100, "container limit", 3, None))
    print("written", flush=True)
    time.sleep(60)
"""


def left(path: Path, entry: Entry) -> Path:
    """The file of a process that did not come to its end."""
    box = BlackBox(path)
    box.__enter__()
    box.write(entry)
    return path


def test_what_a_killed_process_wrote_is_told_once(tmp_path: Path):
    path = tmp_path / "box"
    with children.launched((sys.executable, "-c", WRITER, str(path))) as (writer,):
        writer.wait_for("written")
    assert last_words(path, tmp_path) == (
        "The kernel before this one died in In[7] line 12 with 95 B of 100 B (container limit), growing 3 B a second."
    )
    assert not path.exists()
    assert last_words(path, tmp_path) == ""


def test_a_clean_end_leaves_no_file(tmp_path: Path):
    path = tmp_path / "box"
    with BlackBox(path) as box:
        box.write(ENTRY)
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


@pytest.mark.parametrize(
    ("kills_count", "how"),
    [(5, "was killed by the system for want of memory"), (4, "died"), (0, "died")],  # 0: the machine was started anew
)
def test_the_systems_own_count_of_kills_is_the_proof(tmp_path: Path, system: Callable[[dict[str, str]], Path], kills_count: int, how: str):
    root = system({**CGROUP, "sys/fs/cgroup/memory.events": f"oom_kill {kills_count}\n"})
    said = last_words(left(tmp_path / "box", ENTRY), root)
    assert said == (
        f"The kernel before this one {how} in In[7] line 12 with 14.8 GiB of 15.0 GiB (container limit), growing 310.0 MiB a second."
    )


def test_memory_is_not_blamed_where_there_was_enough(tmp_path: Path):
    said = last_words(left(tmp_path / "box", replace(ENTRY, used_bytes=GIB)), tmp_path)
    assert said == (
        "The kernel before this one ended in In[7] line 12 without a word, with 1.0 GiB of 15.0 GiB (container limit): "
        "memory was hardly the reason."
    )


def test_a_kernel_that_was_stopped_while_idle_is_no_news(tmp_path: Path):
    assert last_words(left(tmp_path / "box", replace(ENTRY, place="", used_bytes=GIB)), tmp_path) == ""
    assert " in " not in last_words(left(tmp_path / "box", replace(ENTRY, place="")), tmp_path)


def test_what_shrank_is_not_said_to_grow(tmp_path: Path):
    assert "growing" not in last_words(left(tmp_path / "box", replace(ENTRY, growth_bytes_per_s=-5)), tmp_path)


@pytest.mark.parametrize("data", [b"", b"\0" * 4096, b'{"place": "In[1', b'{"place": 1}\0', b"[]\0", b"\xff\xfe\0"])
def test_a_file_that_cannot_be_read_is_removed_without_a_word(tmp_path: Path, data: bytes):
    path = tmp_path / "box"
    path.write_bytes(data)
    assert last_words(path, tmp_path) == ""
    assert not path.exists()
