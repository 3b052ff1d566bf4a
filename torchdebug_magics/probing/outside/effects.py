"""What a run does to the disk and the outside world: noted in a first run, put back around each rerun, or the reason for none."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchdebug_magics.machine.kept_files import FileStore, Stamp, Version, stamp_of
from torchdebug_magics.probing.distributed import this_rank
from torchdebug_magics.probing.outside.acts import Asker, hear, unhear
from torchdebug_magics.probing.outside.open_files import OpenFiles, mapped_paths, path_of_descriptor, paths_written_by_others
from torchdebug_magics.probing.outside.surroundings import Surroundings
from torchdebug_magics.probing.outside.unseen_changes import Folders, strings_in
from torchdebug_magics.probing.safety import Guard, interrupts_held

_Phase: TypeAlias = Literal["idle", "first", "rerun", "trial"]
_MOST_BYTES, _ROOM_BYTES = 64 << 20, 256 << 20
"""Bytes of a file, and of all files, that are copied before anybody is known to write them, where no string of the user's names them."""
_MOST_NAMED_BYTES = 2 << 30
"""Bytes of a file that a string names: larger ones are data more often than checkpoints."""
_CLOCK_NS = 2_000_000_000
"""By how much the clock of a file system may be behind."""


class Irrevocable(BaseException):
    """Ends a rerun before an act that nobody can put back, and says so. No `except Exception` of the user's stops it."""


@dataclass
class _Kept:
    """What stood at a path before the first run, and after it."""

    start: Version
    end: Version | None = None

    def version(self, *, at_end: bool) -> Version:
        return self.end or self.start if at_end else self.start


class Effects:
    """Hears and sees what the user's code does outside of its variables.

    Two ways to use it. Where the user's own run comes first, and its effects stay: `begin`, `first` around that run, `over`; if `refusal`
    is empty, `rerun` around each further run. Where all runs are ours, and no effect stays: `trial` around them. At the end `finish`.

    `roots` are the variables and the code of the run: their strings say where writers that Python does not hear of may write. `sentence`
    is what `Irrevocable` says, with ``{}`` for the act. With `anyway`, nothing is refused; unless it `looks`, which takes
    0.1 s, only what Python hears of is put back. `prevent` is called with each irrevocable act of the first run and may raise.
    """

    def __init__(
        self,
        guard: Guard,
        *roots: object,
        sentence: str,
        anyway: bool = False,
        looks: bool = True,
        prevent: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._guard, self._roots, self._anyway, self._prevent = guard, roots, anyway, prevent
        # Of a change that only a look finds, another rank may be the writer: the file of the group's store, for one.
        self._sentence, self._looks = sentence, looks and this_rank.world_size() == 1
        self._open = OpenFiles(guard)
        self._surroundings = Surroundings(guard, looks=False)
        self._phase: _Phase = "idle"
        self._pid = os.getpid()
        self._store = FileStore()
        self._kept: dict[str, _Kept] = {}
        self._reasons: dict[str, None] = {}
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._open.close()
        self._folders = Folders(())
        self._looked: dict[str, Stamp] = {}
        self._mapped: set[str] = set()
        self._began_ns = time.time_ns()
        self._held: set[str] = set()
        """Paths of files that were open, or mapped, before."""
        self._room_bytes, self._named_room_bytes = _ROOM_BYTES, _MOST_NAMED_BYTES
        self._uncopied: list[str] = []
        """Names of files that the code names, and of which no copy could be made."""
        self._heard: set[str] = set()
        self._others: frozenset[str] = frozenset()
        """Paths that other processes have open for writing."""
        self._theirs: set[str] = set()
        """Paths that older threads write meanwhile."""
        self._is_attributed = False

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the files that the run has written, made or removed."""
        return tuple(dict.fromkeys(os.path.basename(path) for path, kept in self._kept.items() if kept.start.stamp.kind != "folder"))

    @property
    def refusal(self) -> str:
        """Why there can be no rerun; or nothing."""
        return self._sentence.format(next(iter(self._reasons))) if self._reasons and not self._anyway else ""

    # --- the user's own run comes first ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Look at everything before the run; a failure is a reason for no rerun."""
        if self._guard.run("looking at files before the run", self._look) is None:
            self._note("has files that could not be looked at")

    def _look(self) -> bool:
        self._begin_anew()
        self._surroundings = Surroundings(self._guard, self._roots, looks=self._looks)
        if not self._looks:
            return True
        self._folders = Folders(strings_in(*self._roots))
        self._mapped = set(mapped_paths())
        self._held = {*self._open.begin(), *self._mapped}
        for path in self._held:
            self._looked[path] = stamp_of(path)
            self._store.version(path)
        self._others = paths_written_by_others()
        self._see(self._folders.look())
        return True

    def first(self, stack: ExitStack) -> None:
        """The user's own run, until the stack closes."""
        self._phase = "first"
        stack.callback(self._idle)
        hear(stack, self)

    def over(self) -> None:
        """The user's own run has ended: keep what it has left."""
        self._idle()
        self._hear_children()
        self._note_unseen()
        self._note_inside()
        for path in self._open.end():
            self._refuse(f"closes {os.path.basename(path)}, which was open before")
        for reason in self._surroundings.shared:
            self._refuse(reason)
        for path, kept in self._kept.items():
            kept.end = version = self._store.version(path, is_changed=True)
            self._store.note("end", path, version)
            if not version.is_whole:
                self._refuse(f"writes {os.path.basename(path)}, of which no copy could be made")
        self._looked = {path: stamp_of(path) for path in {**self._looked, **self._folders.look()}}
        for reason in self._surroundings.left():
            self._refuse(reason)

    @contextmanager
    def rerun(self, *, from_end: bool = False) -> Iterator[None]:
        """The run once more: it finds everything as the first one did, or as that one has left it; afterwards all is as left."""
        with ExitStack() as stack:
            stack.callback(self.recover)
            with interrupts_held(all_of_them=True):
                self._drop_changed_by_others()
                self._store.rerunning(is_begun=True)
                self._phase = "rerun"
                self._put_back(to_end=from_end)
            hear(stack, self)
            with self._shielded():
                yield
        self._end_refused()

    @contextmanager
    def _shielded(self) -> Iterator[None]:
        """Nothing that is older is written, and no thread goes on."""
        with ExitStack() as stack:
            stack.callback(self._wait)
            if not self._anyway:
                self._surroundings.forbid_writes(stack, self._note)
            yield

    def finish(self) -> None:
        """All runs are over, and all is put back. Harmless the second time."""
        if os.getpid() != self._pid:  # a forked child, which ends in our caller's code
            return
        with interrupts_held(all_of_them=True):
            self.recover()
            unhear(self)
            self._open.close()
            self._store.close()
            self._kept = {}
            self._forget()

    def _forget(self) -> None:
        """Hold nothing of the user's any more."""
        self._roots = ()
        self._surroundings = Surroundings(self._guard, looks=False)

    # --- all runs are ours ---------------------------------------------------------------------------------------------------------------

    @contextmanager
    def trial(self, *roots: object) -> Iterator[None]:
        """Runs of ours, from `roots`, if others than before; afterwards all is as before.

        Raises `Irrevocable` before an act that cannot be put back.
        """
        self._roots = roots or self._roots
        with ExitStack() as stack:
            stack.callback(self.recover)
            with interrupts_held():
                self._kept.clear()
                self._reasons.clear()
                self._guard.run("looking at files", self._store.begin_anew)
                self.begin()
                self._phase = "trial"
            uncopied = (f"may write {name}, of which no copy could be made" for name in self._uncopied)
            for reason in (*self._reasons, *self._surroundings.shared, *uncopied):
                self._refuse(reason)
            hear(stack, self)
            with self._shielded():
                yield
            for reason in self._surroundings.left():
                self._refuse(reason)
        self._end_refused()

    def _end_refused(self) -> None:
        """The user's code may have caught what ended it."""
        if self.refusal:
            raise Irrevocable(self.refusal)

    def again(self) -> None:
        """Another run of a trial begins: everything is put back."""
        if self._phase == "trial":
            self._wait()
            with interrupts_held(all_of_them=True):
                self._see_trial()
                self._put_back(to_end=False)

    def attribute(self) -> None:
        """The first step of a trial is over: what has changed meanwhile was changed by the step, what changes later need not be."""
        if self._phase == "trial":
            self._is_attributed = True
            self._wait()
            self._note_unseen()

    def recover(self) -> None:
        """Put everything back after a rerun or a trial, also one that interrupts have ended. Harmless the second time."""
        if self._phase in {"first", "idle"} or os.getpid() != self._pid:
            return
        with interrupts_held(all_of_them=True):
            self._guard.run("looking for changed files", self._see_rerun if self._phase == "rerun" else self._see_trial)
            self._put_back(to_end=self._phase == "rerun")
            if self._phase == "trial":
                self._kept.clear()
                self._forget()
            self._guard.run("removing a mark", self._store.rerunning, is_begun=False)
            self._phase = "idle"  # last: what an interrupt has cut short is done by another call

    # --- what is heard -------------------------------------------------------------------------------------------------------------------

    def changes(self, path: str, who: Asker) -> None:
        """As `Listener`."""
        __tracebackhide__ = True
        if self._phase == "idle" or self._store.is_own(path) or (who == "python" and not self._surroundings.is_thread_of_run()):
            return
        if self._surroundings.is_older_thread():
            if who in {"user", "library"}:  # nothing is raised in it: the thread is the user's
                self._theirs.add(path)
                if path in self._kept:
                    self._note(f"writes {os.path.basename(path)}, as an older thread does")
            return
        if path in self._theirs:
            self._refuse(f"writes {os.path.basename(path)}, as an older thread does")
        if path in self._others:
            self._refuse(f"writes {os.path.basename(path)}, which another process has open")
        if path not in self._kept and not self._guard.run("keeping a file", self._keep, path):
            self._refuse(f"writes {os.path.basename(path)}, of which no copy could be made")

    def _keep(self, path: str) -> bool:
        """Copy what is about to be changed; whether it can be put back."""
        if self._looks and self._phase != "rerun":
            for folder in (path, os.path.dirname(path)):
                self._see(self._folders.add(folder))
        # A writer that Python does not hear of may have been there first.
        is_first = not self._folders.covers(path) or not self._has_changed(path, stamp_of(path))
        self._heard.add(path)
        return self._note_start(path, None if is_first else self._before(path)).is_whole

    def writes(self, number: int) -> None:
        """As `Listener`."""
        __tracebackhide__ = True
        known = path_of_descriptor(number)
        if known is not None and known not in self._kept and self._phase in {"first", "trial"}:
            path = self._open.met(number)
            if path is not None:
                self.changes(path, "user")

    def acts(self, what: str) -> None:
        """As `Listener`."""
        __tracebackhide__ = True
        if self._phase == "idle" or self._surroundings.is_older_thread():
            return
        if self._phase == "first":
            self._prevent(what)
        self._refuse(what)

    def forks(self, who: Asker) -> None:
        """As `Listener`."""
        if self._phase != "idle":
            self._surroundings.forks(who)
            self._guard.run("making a folder for copies", lambda: self._store.folder)  # before, so that the child copies to the same

    def starts(self, thread: threading.Thread) -> None:
        """As `Listener`."""
        if self._phase != "idle" and not self._surroundings.is_older_thread():
            self._surroundings.starts(thread)

    def feeds(self, items: object) -> None:
        """As `Listener`."""
        __tracebackhide__ = True
        if self._phase != "idle" and not self._surroundings.is_older_thread():
            for reason in self._surroundings.feeds(items):
                self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        """Note it in the first run; in a later one, prevent it."""
        __tracebackhide__ = True
        if os.getpid() != self._pid:
            self._store.note_act(reason)
        self._note(reason)
        if self._phase in {"rerun", "trial"} and not self._anyway:
            raise Irrevocable(self._sentence.format(reason))

    # --- files ---------------------------------------------------------------------------------------------------------------------------

    def _note_start(self, path: str, version: Version | None = None) -> Version:
        version = self._kept.setdefault(path, _Kept(version or self._store.version(path))).start
        if self._phase in {"rerun", "trial"}:
            self._store.rerunning(is_begun=True)
        self._store.note("start", path, version)
        return version

    def _see(self, stamps: Mapping[str, Stamp]) -> None:
        """Copy what may be written unheard: all files that the user's strings name, and small ones while there is room."""
        new = {path: stamp for path, stamp in stamps.items() if path not in self._looked}
        self._looked |= new
        files = [(path, stamp) for path, stamp in new.items() if stamp.kind == "file"]
        for path, stamp in sorted(files, key=lambda entry: -entry[1].changed_ns):
            is_small = stamp.size_bytes <= min(_MOST_BYTES, self._room_bytes)
            if not is_small and not (self._folders.is_named(path) and stamp.size_bytes <= min(_MOST_NAMED_BYTES, self._named_room_bytes)):
                continue
            self._room_bytes -= stamp.size_bytes if is_small else 0
            self._named_room_bytes -= 0 if is_small else stamp.size_bytes
            version = self._guard.run("copying a file", self._store.version, path)
            if self._folders.has_own_name(path) and (version is None or not version.is_whole):
                self._uncopied.append(os.path.basename(path))

    def _unseen(self) -> list[tuple[str, Version]]:
        """Paths that have changed and were not heard of, with what stood there before."""
        if not self._looks:
            return []
        self._open.flush()
        now = {**self._folders.look(), **{path: stamp_of(path) for path in self._looked}}
        return [(path, self._before(path)) for path, stamp in now.items() if path not in self._kept and self._has_changed(path, stamp)]

    def _has_changed(self, path: str, stamp: Stamp) -> bool:
        before = self._looked.get(path)
        if before is None:  # one that is older was overlooked, and must never be taken for a new one
            return stamp.made_ns >= self._began_ns - _CLOCK_NS
        return path in self._mapped or not stamp.is_same(before)

    def _before(self, path: str) -> Version:
        stamp = self._looked.get(path, Stamp("absent"))
        return Version(stamp) if stamp.kind == "absent" else self._store.known(path, stamp)

    def _is_of_run(self, path: str) -> bool:
        """Whether an unheard change is one of the run, and not of another process."""
        return path in self._held or self._folders.is_named(path)

    def _note_unseen(self) -> None:
        """What was changed unheard, as far as the run may have done it."""
        changed = [(path, before) for path, before in self._unseen() if self._is_of_run(path)]
        for path, before in changed:
            is_new_elsewhere = before.stamp.kind == "absent" and not self._folders.has_own_name(path)
            if path in self._others or is_new_elsewhere:
                continue
            if before.is_whole:
                self._note_start(path, before)
            elif self._phase == "trial":
                self._guard.note(f"{path} was changed, unheard by Python, and there was no copy to put back")
            else:
                self._note(f"writes {os.path.basename(path)}, of which no copy could be made")

    def _drop_changed_by_others(self) -> None:
        """What has changed since the first run, and while none of ours runs, is another process's."""
        for path, end in [(path, kept.version(at_end=True)) for path, kept in self._kept.items() if path not in self._heard]:
            if end.stamp.kind == "file" and not self._store.is_away(end) and not stamp_of(path).is_same_content(end.stamp):
                self._guard.note(f"{path} is changed by another process meanwhile: it was left as it is")
                del self._kept[path]

    def _note_inside(self) -> None:
        """All that is in a folder which the run has made is of the run."""
        for path in [path for path, kept in self._kept.items() if kept.start.stamp.kind == "absent"]:
            for folder, folders, names in os.walk(path) if not os.path.islink(path) else ():
                for name in (*folders, *names):
                    self._kept.setdefault(os.path.join(folder, name), _Kept(Version(Stamp("absent"))))

    def _hear_children(self) -> None:
        for phase, what, version in self._store.news():
            if phase == "act":
                self._note(what)
            elif phase == "start" and version is not None:
                self._kept.setdefault(what, _Kept(version))

    def _see_rerun(self) -> None:
        self._hear_children()
        self._note_inside()
        for path, _ in self._unseen():
            if self._is_of_run(path):
                self._guard.note(f"{path} has changed during a rerun, unheard by Python: it was left as it is")

    def _see_trial(self) -> None:
        self._hear_children()
        self._note_inside()
        known = set(self._kept)
        self._note_unseen()
        for path in self._kept.keys() - known if self._is_attributed else ():
            if path not in self._held and stamp_of(path).kind == "file":
                kept = self._store.set_aside(path)
                self._guard.note(f"{path} was changed meanwhile, unheard by Python, and put back: what was written is in {kept}")

    def _put_back(self, *, to_end: bool) -> None:
        self._open.flush()
        versions = {path: kept.version(at_end=to_end) for path, kept in self._kept.items()}
        if not to_end:
            for path, kept in self._kept.items():
                if kept.end is not None and kept.end.stamp.kind == "file" and kept.start.stamp.inode != kept.end.stamp.inode:
                    self._store.anchor(path, kept.end)
        whole = {path: version for path, version in versions.items() if version.is_whole and path not in self._theirs}
        for path in self._store.put_back(whole):
            copy = self._store.keep(versions[path])
            self._guard.note(f"{path} could not be put back" + (f": its copy is {copy}" if copy else ""))
        self._open.put_back(to_end=to_end)

    def _wait(self) -> None:
        for reason in self._surroundings.wait():
            self._note(reason)

    def _note(self, reason: str) -> None:
        self._reasons[reason] = None

    def _idle(self) -> None:
        if self._phase == "first":
            self._phase = "idle"
