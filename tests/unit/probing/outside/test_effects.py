"""Effects of a run: any sequence of changes is put back around reruns, by writers that Python hears of and by those that it does not."""

from __future__ import annotations

import ast
import ctypes
import gzip
import itertools
import os
import queue
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import torchdebug_magics
from tests import children
from torchdebug_magics.machine.kept_files import FileStore, abandoned_copies
from torchdebug_magics.probing.outside import open_files
from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.safety import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAMES = ("a.bin", "b.bin", "c.txt", "inner/d.bin", "inner/deep/e.txt", "link")
LIBC = ctypes.CDLL(None)
LIBC.fopen.restype = ctypes.c_void_p
LIBC.fopen.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
LIBC.fputs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
LIBC.fclose.argtypes = (ctypes.c_void_p,)


def write_unheard(path: Path, text: str, mode: str = "w") -> None:
    """As a library in C or Rust does: Python raises no audit event."""
    file = LIBC.fopen(str(path).encode(), mode.encode())
    if not file:
        raise OSError(path)
    LIBC.fputs(text.encode(), file)
    LIBC.fclose(file)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def remove_tree(root: Path) -> None:
    for inner in sorted((root / "inner").rglob("*"), reverse=True):
        inner.rmdir() if inner.is_dir() and not inner.is_symlink() else inner.unlink()


HEARD: dict[str, Callable[[Path, Path, str, Path], object]] = {
    "write": lambda path, _other, text, _root: path.write_text(text),
    "append": lambda path, _other, text, _root: append(path, text),
    "remove": lambda path, _other, _text, _root: path.unlink(),
    "replace": lambda path, other, _text, _root: path.replace(other),
    "link": lambda path, _other, _text, _root: path.symlink_to("a.bin"),
    "hard link": lambda path, other, _text, _root: other.hardlink_to(path),
    "mode": lambda path, _other, text, _root: path.chmod(0o640 if len(text) % 2 else 0o600),
    "cut": lambda path, _other, text, _root: os.truncate(path, len(text) % 20),
    "tree": lambda _path, _other, _text, root: remove_tree(root),
}
UNHEARD: dict[str, Callable[[Path, Path, str, Path], object]] = {
    "unheard": lambda path, _other, text, _root: write_unheard(path, text),
    "unheard append": lambda path, _other, text, _root: write_unheard(path, text, "a"),
}


def change_at_random(root: Path, seed: int, *, count: int = 12, only_heard: bool = False) -> None:
    """Changes files as user code does; `asker` takes this file for the user's."""
    draw, changes = random.Random(seed), HEARD if only_heard else {**HEARD, **UNHEARD}
    for _ in range(count):
        path, other, text = root / draw.choice(NAMES), root / draw.choice(NAMES), f"{draw.random()}" * draw.randint(0, 50)
        with suppress(OSError):  # what is not there cannot be moved
            path.parent.mkdir(parents=True, exist_ok=True)
            changes[draw.choice(list(changes))](path, other, text, root)


def state(root: Path) -> dict[str, object]:
    """All that is below a folder, without times."""
    result: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            result[name] = ("link", str(path.readlink()))
        elif path.is_dir():
            result[name] = "folder"
        else:
            result[name] = (path.read_bytes(), path.stat().st_mode)
    return result


def filled(root: Path, seed: int) -> Path:
    root.mkdir(parents=True)
    change_at_random(root, seed, count=6)
    return root


@pytest.fixture
def effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Effects]]:
    """Makes effects of code that names the files; nothing of theirs is left at the end."""
    monkeypatch.chdir(tmp_path)
    made: list[Effects] = []

    def make(*roots: object, **options: Any) -> Effects:
        made.append(Effects(Guard(), list(NAMES), *roots, sentence="it {}", **options))
        return made[-1]

    yield make
    for one in made:
        one.finish()


@pytest.mark.parametrize("seed", range(40))
def test_a_rerun_finds_the_start_and_leaves_the_end(effects: Callable[..., Effects], tmp_path: Path, seed: int) -> None:
    root = filled(tmp_path / "work", seed)
    watched = effects(str(root))
    before = state(root)
    watched.begin()
    with ExitStack() as stack:
        watched.first(stack)
        change_at_random(root, seed + 1000)
    end = state(root)
    watched.over()
    assert watched.refusal == ""
    for number in range(3):
        with watched.rerun(from_end=number == 2):
            assert state(root) == (end if number == 2 else before)
            # What a writer that nobody hears of makes anew in a rerun may be another process's.
            change_at_random(root, seed + 1000 + number, only_heard=number > 0)
        assert state(root) == end


@pytest.mark.parametrize("seed", range(40))
def test_a_trial_leaves_the_start(effects: Callable[..., Effects], tmp_path: Path, seed: int) -> None:
    root = filled(tmp_path / "work", seed)
    watched = effects(str(root))
    before = state(root)
    with watched.trial():
        change_at_random(root, seed + 1000)
        watched.attribute()
        watched.again()
        assert state(root) == before
        change_at_random(root, seed + 1000)
    assert state(root) == before


def rerun_that_fails(watched: Effects, path: Path, error: type[BaseException]) -> None:
    with watched.rerun():
        path.write_text("rerun")
        raise error


def test_an_error_or_an_interrupt_in_a_rerun_leaves_the_end(effects: Callable[..., Effects], tmp_path: Path) -> None:
    watched = effects()
    watched.begin()
    with ExitStack() as stack:
        watched.first(stack)
        (tmp_path / "a.bin").write_text("end")
    watched.over()
    for error in (ValueError, KeyboardInterrupt, Irrevocable):
        with pytest.raises(error):
            rerun_that_fails(watched, tmp_path / "a.bin", error)
        assert (tmp_path / "a.bin").read_text() == "end"


def test_handles_that_were_open_go_on_where_the_first_run_left_them(effects: Callable[..., Effects], tmp_path: Path) -> None:
    watched = effects()
    with (tmp_path / "log.csv").open("w+") as log, (tmp_path / "raw").open("wb") as raw:
        log.write("before\n")
        number = os.open(tmp_path / "number", os.O_RDWR | os.O_CREAT)
        os.write(number, b"ab")
        watched.begin()
        with ExitStack() as stack:
            watched.first(stack)
            log.write("first\n")
            raw.write(b"123")
            os.write(number, b"cd")
        watched.over()
        assert watched.refusal == ""
        with watched.rerun():
            assert (tmp_path / "log.csv").read_text() == "before\n"
            log.write("another\n")
            raw.write(b"7")
            os.write(number, b"efgh")
        log.write("after\n")
        raw.write(b"45")
        os.write(number, b"x")
        os.close(number)
    contents = {path.name: path.read_text() for path in sorted(tmp_path.iterdir())}
    assert contents == {"log.csv": "before\nfirst\nafter\n", "number": "abcdx", "raw": "12345"}


def test_a_file_that_is_still_open_for_the_user_keeps_what_is_written_later(effects: Callable[..., Effects], tmp_path: Path) -> None:
    watched = effects()
    watched.begin()
    with ExitStack() as stack:
        watched.first(stack)
        log = (tmp_path / "log").open("w")
        log.write("first ")
        log.flush()
    watched.over()
    with watched.rerun():
        (tmp_path / "log").write_text("rerun")
    log.write("later")
    log.close()
    assert (tmp_path / "log").read_text() == "first later"


def test_files_of_others_in_the_same_folder_are_left_alone(effects: Callable[..., Effects], tmp_path: Path) -> None:
    watched = effects()
    watched.begin()
    with ExitStack() as stack:
        watched.first(stack)
        (tmp_path / "a.bin").write_text("end")
        write_unheard(tmp_path / "theirs", "1")
    watched.over()
    with watched.rerun():
        assert (tmp_path / "theirs").read_text() == "1"
        write_unheard(tmp_path / "theirs", "2")
        write_unheard(tmp_path / "notebook.ipynb", "saved")
    assert ((tmp_path / "theirs").read_text(), (tmp_path / "notebook.ipynb").read_text()) == ("2", "saved")


def test_what_a_trial_overwrote_unheard_after_its_first_step_is_kept_beside(effects: Callable[..., Effects], tmp_path: Path) -> None:
    (tmp_path / "best_3.pt").write_text("mine")
    guard = Guard()
    watched = Effects(guard, ["best_"], sentence="it {}")
    with watched.trial():
        watched.attribute()
        write_unheard(tmp_path / "best_3.pt", "other")
    watched.finish()
    assert (tmp_path / "best_3.pt").read_text() == "mine"
    (problem,) = guard.problems
    kept = Path(problem.rpartition(" is in ")[2])
    assert kept.read_text() == "other"
    kept.unlink()


def connect() -> None:
    import socket

    with socket.socket() as client:
        client.connect(("127.0.0.1", 9))


ACTS: dict[str, tuple[Callable[[], object], str]] = {
    "socket": (connect, "it connects to 127.0.0.1:9"),
    "command": (lambda: os.system("true"), "it runs the command `true`"),
    "signal": (lambda: os.kill(os.getppid(), 18), "it sends a signal to process"),
}


@pytest.mark.parametrize("name", ACTS)
def test_an_act_that_cannot_be_put_back_is_refused_before_it_happens(effects: Callable[..., Effects], name: str) -> None:
    act, sentence = ACTS[name]
    watched, went_on = effects(), []

    def run() -> None:
        with suppress(ConnectionRefusedError):
            act()
        went_on.append(name)

    with pytest.raises(Irrevocable, match=sentence), watched.trial():
        run()
    assert went_on == []
    with effects(anyway=True).trial():
        run()
    assert went_on == [name]


def test_a_refusal_that_the_code_catches_is_one_all_the_same(effects: Callable[..., Effects]) -> None:
    def run() -> None:
        with suppress(BaseException):
            os.system("true")

    with pytest.raises(Irrevocable, match="it runs the command"), effects().trial():
        run()


def test_work_for_an_older_thread_is_refused(effects: Callable[..., Effects], tmp_path: Path) -> None:
    items: queue.Queue[str] = queue.Queue()

    def write_all() -> None:
        while text := items.get():
            (tmp_path / "log").write_text(text)

    thread = threading.Thread(target=write_all, name="writer")
    thread.start()
    with ThreadPoolExecutor(1, "pool") as pool:
        pool.submit(int).result()
        with pytest.raises(Irrevocable, match="it hands work to the thread `writer`, which is older"), effects().trial():
            items.put("trial")
        with pytest.raises(Irrevocable, match="it hands work to the thread `pool_0`, which is older"), effects().trial():
            pool.submit((tmp_path / "log").write_text, "trial")
    items.put("")
    thread.join()
    assert not (tmp_path / "log").exists()


def test_a_thread_or_a_database_that_outlives_the_run_refuses_the_rerun(effects: Callable[..., Effects], tmp_path: Path) -> None:
    go_on = threading.Event()
    namespace: dict[str, object] = {}
    watched = effects(namespace)
    watched.begin()
    with ExitStack() as stack:
        watched.first(stack)
        thread = threading.Thread(target=go_on.wait, args=(60,), name="waits")
        thread.start()
    watched.over()
    go_on.set()
    thread.join()
    assert watched.refusal == "it leaves the thread `waits` running"

    watched = effects(namespace)
    watched.begin()
    with ExitStack() as stack:
        watched.first(stack)
        namespace["runs"] = runs = sqlite3.connect(tmp_path / "runs.db")
        runs.execute("create table run(loss)")
        runs.execute("insert into run values (1)")
    watched.over()
    runs.close()
    assert watched.refusal == "it leaves the database behind `runs` in a transaction"


def test_what_a_thread_writes_that_is_not_joined_is_put_back_too(effects: Callable[..., Effects], tmp_path: Path) -> None:
    def late() -> None:
        time.sleep(0.2)
        (tmp_path / "late").write_text("1")

    def run() -> None:
        threading.Thread(target=late, name="late").start()

    with pytest.raises(Irrevocable, match="it leaves the thread `late` running"), effects().trial():
        run()
    assert not (tmp_path / "late").exists()


def test_a_database_that_is_open_refuses_to_be_written_in_a_trial(effects: Callable[..., Effects], tmp_path: Path) -> None:
    runs = sqlite3.connect(tmp_path / "runs.db")
    runs.execute("create table run(loss)")
    runs.commit()

    def run() -> None:
        assert runs.execute("select count(*) from run").fetchone() == (0,)
        with suppress(sqlite3.DatabaseError):
            runs.execute("insert into run values (1)")

    with (
        pytest.raises(Irrevocable, match="it changes the database behind `runs`"),
        effects({"runs": runs}, *ast.parse("runs").body).trial(),
    ):
        run()
    runs.execute("insert into run values (2)")
    runs.commit()
    assert runs.execute("select * from run").fetchall() == [(2,)]
    runs.close()


def test_a_stream_that_the_code_uses_and_that_cannot_be_put_back_refuses_the_trial(effects: Callable[..., Effects], tmp_path: Path) -> None:
    reads, writes = os.pipe()
    with gzip.open(tmp_path / "log.gz", "wt") as packed, os.fdopen(writes, "w") as sink, os.fdopen(reads):
        namespace = {"packed": packed, "sink": sink}
        for name, code in (("packed", "packed.write('1')"), ("sink", "print(1, file=sink)")):
            watched = effects(namespace, *ast.parse(code).body)
            with pytest.raises(Irrevocable, match=f"it may write to the open stream `{name}`"), watched.trial():
                pass
        with effects(namespace, *ast.parse("x = 1").body).trial():
            pass


def test_what_others_write_during_the_first_step_is_theirs(effects: Callable[..., Effects], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("x = 1")
    with effects(tmp_path).trial():
        write_unheard(tmp_path / "results.csv", "1,2")
        write_unheard(tmp_path / "model.py", "x = 2")
    watched = effects()
    with watched.trial():
        write_unheard(tmp_path / "results.csv", "3,4")
        watched.attribute()
    assert ((tmp_path / "results.csv").read_text(), (tmp_path / "model.py").read_text()) == ("3,4", "x = 2")


def test_a_file_that_another_process_has_open_is_not_written(
    effects: Callable[..., Effects], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "child_pids", lambda _: [])  # the other process is a child of this one
    (tmp_path / "log").write_text("")
    code = "import sys, time\nfile = open(sys.argv[1], 'a')\nprint('open', flush=True)\ntime.sleep(60)"
    with children.launched((sys.executable, "-c", code, str(tmp_path / "log"))) as (child,):
        child.wait_for("open")
        with pytest.raises(Irrevocable, match="it writes log, which another process has open"), effects().trial():
            append(tmp_path / "log", "mine")
    assert (tmp_path / "log").read_text() == ""


def test_a_named_file_that_cannot_be_copied_refuses_the_trial(
    effects: Callable[..., Effects], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.bin").write_text("1")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 30, free=0))
    with pytest.raises(Irrevocable, match=r"it may write a.bin, of which no copy could be made"), effects().trial():
        write_unheard(tmp_path / "a.bin", "2")
    assert (tmp_path / "a.bin").read_text() == "1"


def test_a_hidden_file_that_the_code_names_is_put_back(effects: Callable[..., Effects], tmp_path: Path) -> None:
    (tmp_path / ".last.pt").write_text("mine")
    with effects([".last.pt"]).trial():
        write_unheard(tmp_path / ".last.pt", "trial")
    assert (tmp_path / ".last.pt").read_text() == "mine"


def test_a_folder_that_is_too_full_is_not_moved(effects: Callable[..., Effects], tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for number in range(10_001):
        (tmp_path / "old" / str(number)).touch()
    with pytest.raises(Irrevocable, match="it moves or removes a folder of more than 10,000 files"), effects().trial():
        (tmp_path / "old").rename(tmp_path / "new")
    assert len(list((tmp_path / "old").iterdir())) == 10_001


def test_a_hard_link_in_the_place_of_a_file_is_not_written_through(effects: Callable[..., Effects], tmp_path: Path) -> None:
    (tmp_path / "latest.pt").write_text("old")
    (tmp_path / "epoch1.pt").write_text("new weights")
    with effects().trial():
        (tmp_path / "latest.pt").unlink()
        (tmp_path / "latest.pt").hardlink_to(tmp_path / "epoch1.pt")
    assert ((tmp_path / "latest.pt").read_text(), (tmp_path / "epoch1.pt").read_text()) == ("old", "new weights")


MOST_PRESSES = 60
"""Then the storm ends by itself, as an interrupt that lands outside of the test ends the run of all."""


@pytest.mark.parametrize("every_s", [0.002, 0.01])
def test_however_often_stop_is_pressed_all_is_put_back(effects: Callable[..., Effects], tmp_path: Path, every_s: float) -> None:
    before = os.urandom(1 << 20) * 24
    (tmp_path / "best.pt").write_bytes(before)
    watched = effects()

    presses = itertools.count()

    def press(*_: object) -> None:
        if next(presses) > MOST_PRESSES:
            signal.setitimer(signal.ITIMER_REAL, 0)
        else:
            signal.raise_signal(signal.SIGINT)

    def until_over() -> bool:
        while True:
            try:
                while signal.getitimer(signal.ITIMER_REAL)[0]:
                    time.sleep(0.001)
            except KeyboardInterrupt:
                continue
            return True

    def run() -> None:
        with watched.trial():
            (tmp_path / "best.pt").write_bytes(b"trial" * (1 << 20))
            signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
            time.sleep(5)

    handler = signal.signal(signal.SIGALRM, press)
    is_interrupted = False
    try:
        run()
    except KeyboardInterrupt:
        is_interrupted = until_over()
    signal.signal(signal.SIGALRM, handler)
    watched.finish()
    assert is_interrupted
    assert (tmp_path / "best.pt").read_bytes() == before


def test_a_later_trial_knows_nothing_of_an_earlier_one(effects: Callable[..., Effects], tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("v0")
    watched = effects()
    with watched.trial(list(NAMES)):
        write_unheard(tmp_path / "a.bin", "trial")
    (tmp_path / "a.bin").write_text("v2")
    with watched.trial(list(NAMES)):
        pass
    assert (tmp_path / "a.bin").read_text() == "v2"


def test_a_new_thread_is_no_older_one_though_it_gets_the_same_number(effects: Callable[..., Effects], tmp_path: Path) -> None:
    (tmp_path / "ck.pt").write_text("mine")
    go_on = threading.Event()
    older = threading.Thread(target=go_on.wait)
    older.start()
    with effects().trial():
        go_on.set()
        older.join()
        for _ in range(20):
            thread = threading.Thread(target=(tmp_path / "ck.pt").write_text, args=("trial",))
            thread.start()
            thread.join()
    assert (tmp_path / "ck.pt").read_text() == "mine"


WRITES = "import sqlite3, sys\nsqlite3.connect(sys.argv[1], timeout=0.1).execute('insert into run values (7)')"


def test_a_database_keeps_its_locks(effects: Callable[..., Effects], tmp_path: Path) -> None:
    runs = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    runs.execute("create table run(loss)")
    runs.execute("begin immediate")
    with effects({"runs": runs}, ["runs.db"]).trial():
        (tmp_path / "a.bin").write_text("1")
    with children.launched((sys.executable, "-c", WRITES, str(tmp_path / "runs.db"))) as (child,):
        assert "database is locked" in child.ended().err
    runs.execute("insert into run values (1)")
    runs.execute("commit")
    assert runs.execute("select * from run").fetchall() == [(1,)]
    runs.close()


def test_a_file_that_stays_open_also_where_copies_are_on_another_disk(
    effects: Callable[..., Effects], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one file system only")
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    test_a_file_that_is_still_open_for_the_user_keeps_what_is_written_later(effects, tmp_path)


SHARES = """
import torch.multiprocessing
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.outside.effects import Effects
items = torch.multiprocessing.get_context("fork").Queue()
with Effects(Guard(), sentence="{}").trial():
    items.put(torch.ones(2))
print(items.get(timeout=20).tolist())
items.put(torch.ones(3))
print(items.get(timeout=20).tolist())
"""


def test_a_library_keeps_the_sockets_that_it_has_made() -> None:
    with children.launched((sys.executable, "-c", SHARES)) as (child,):
        assert child.check().out.split("\n") == ["[1.0, 1.0]", "[1.0, 1.0, 1.0]", ""]


def test_a_file_that_is_none_is_not_read(effects: Callable[..., Effects]) -> None:
    with effects(["/proc/self/statm", "/dev/null"]).trial():
        assert Path("/proc/self/statm").read_text()


def test_a_failure_of_ours_is_a_refusal_and_no_error_of_the_users(effects: Callable[..., Effects], tmp_path: Path) -> None:
    watched = effects()
    watched.begin()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        watched.first(stack)
        patch.setattr(FileStore, "note", lambda *_: 1 / 0)
        (tmp_path / "a.bin").write_text("1")
    watched.over()
    assert watched.refusal == "it writes a.bin, of which no copy could be made"
    assert (tmp_path / "a.bin").read_text() == "1"


def test_a_torn_journal_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    store = FileStore()
    (tmp_path / "a.bin").write_text("1")
    store.note("start", str(tmp_path / "a.bin"), store.version(str(tmp_path / "a.bin")))
    with Path(store.folder, "journal.jsonl").open("a") as file:
        file.write('{"phase": "sta')
    assert [path for _, path, _ in store.news()] == [str(tmp_path / "a.bin")]
    store.close()


KILLED = """
import ctypes, os, sys, torch
from pathlib import Path
import torchdebug_magics
os.chdir(sys.argv[1])
runs = 0
def work():
    global runs
    runs += 1
    Path("last.pt").write_text("a new checkpoint")
    Path("old.pt").unlink()
    if hasattr(torch, "been"):
        Path("last.pt").write_text("half a chec")
        ctypes.CDLL(None).kill(os.getpid(), 9)
    torch.been = True
    return torch.ones(2)
torchdebug_magics.verify(work)
"""


def test_a_process_that_is_killed_in_a_rerun_leaves_copies_and_the_next_one_says_where(
    tmp_path: Path, capsys: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = str(tmp_path_factory.mktemp("copies"))  # else the kernel of another test says it, too
    monkeypatch.setenv("TMPDIR", own)
    monkeypatch.setattr(tempfile, "tempdir", own)
    (tmp_path / "last.pt").write_text("the checkpoint before")
    (tmp_path / "old.pt").write_text("old")
    (tmp_path / "other.pt").write_text("other")
    with children.launched((sys.executable, "-c", KILLED, str(tmp_path))) as (child,):
        assert child.ended().code == -9
    copies = {path: copy for path, copy in abandoned_copies().items() if path.startswith(str(tmp_path))}
    assert {Path(path).name: Path(copy).read_text() for path, copy in copies.items()} == {"last.pt": "a new checkpoint"}
    assert (tmp_path / "other.pt").read_text() == "other"

    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    torchdebug_magics.load_ipython_extension(shell)
    torchdebug_magics.unload_ipython_extension(shell)
    shown = capsys.readouterr().out
    assert "a kernel was killed while a magic ran code again" in shown
    (path, copy) = next(iter(copies.items()))
    assert f"cp {copy} {path}" in " ".join(shown.split())
    Path(path).write_bytes(Path(copy).read_bytes())
    assert path not in abandoned_copies()
    assert not Path(copy).exists()


def test_a_store_that_is_never_used_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    FileStore().close()
    assert list(tmp_path.iterdir()) == []
