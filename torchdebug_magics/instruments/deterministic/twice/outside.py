"""What a run takes from outside, or leaves there: files that it writes, and what the user types."""

from __future__ import annotations

import builtins
import io
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import serialization

from torchdebug_magics.errors import DeterminismError
from torchdebug_magics.probing.where import owner

__all__ = ["Outside"]

_WRITING = frozenset("wax+")
_SAVER = serialization._open_zipfile_writer_file
"""What `torch.save` writes a file with: it opens none in Python."""
_MOST_BYTES = 64 << 20
"""Of a file that is kept before it is written over."""


class Outside:
    """Files are written and questions asked by the first run alone: later ones write to copies, and hear the same answers."""

    def __init__(self, namespace: dict[str, Any], *, strict: bool) -> None:
        self._namespace = namespace
        self._strict = strict
        """Whether the user's line that does such a thing raises."""
        self._answers: list[str] = []
        self._sizes: dict[Path, int | None] = {}
        """Of files that the first run has written, before it did; None of those that were not there."""
        self._of_libraries: set[Path] = set()
        """Of these, the ones that no code of the user's has opened itself."""
        self._contents: dict[Path, bytes] = {}
        """Of those that it has written over, before it did."""
        self._appended: dict[str, None] = {}
        self._undos: list[Callable[[], None]] = []

    @property
    def said(self) -> tuple[str, ...]:
        """What a second run does not find as the first one did."""
        asked = ("what was typed for `input()`",) if self._answers else ()
        return (*asked, *(f"the file {name}, which is added to" for name in self._appended))

    def first(self, stack: ExitStack) -> None:
        """Note what happens, from here until the stack closes."""
        ask, opener = builtins.input, builtins.open

        def asked(*prompt: Any) -> str:
            __tracebackhide__ = True
            if self._strict:
                raise DeterminismError(_REFUSED.format("`input()` asks"))
            self._answers.append(ask(*prompt))
            return self._answers[-1]

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if _WRITING & set(mode) and isinstance(file, (str, Path)):
                if _opens(sys._getframe(1)) != "user":
                    self._of_libraries.add(Path(file).absolute())
                self._will_write(Path(file), mode)
            return opener(file, mode, *args, **kwargs)

        def saved(file: str) -> Any:
            self._will_write(Path(file), "w")
            return _SAVER(file)

        self._stand_in(stack, asked, opened, saved)

    def again(self, stack: ExitStack) -> None:
        """Nothing gets out, from here until the stack closes."""
        answers = deque(self._answers)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchdebug-")))
        copies: dict[Path, Path] = {}
        opener = builtins.open
        # What a library has written and moved elsewhere since is left to it.
        ours = {path for path in self._sizes if path not in self._of_libraries or path.exists()}

        def copy_of(path: Path) -> Path:
            if path not in copies:
                copies[path] = folder / str(len(copies))
                self._copy(path, copies[path])
            return copies[path]

        def asked(*_prompt: Any) -> str:
            if not answers:
                raise EOFError
            return answers.popleft()

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            who = _opens(sys._getframe(1))
            path = Path(file).absolute() if isinstance(file, (str, Path)) and who != "own" else None
            if path is not None and (path in copies or path in ours or (_WRITING & set(mode) and who == "user")):
                file = copy_of(path)
            return opener(file, mode, *args, **kwargs)

        self._stand_in(stack, asked, opened, lambda file: _SAVER(str(copy_of(Path(file).absolute()))))

    def undo(self) -> None:
        """Nothing stands in any more. Harmless where nothing does."""
        while self._undos:
            self._undos[-1]()

    def _stand_in(self, stack: ExitStack, asked: Any, opened: Any, saved: Any) -> None:
        held: list[tuple[dict[str, Any], str, Any]] = [
            (vars(builtins), "input", asked),
            (vars(builtins), "open", opened),
            (vars(io), "open", opened),
            (vars(serialization), _SAVER.__name__, saved),
        ]
        if getattr(self._namespace.get("open"), "__wrapped__", None) is io.open:  # IPython's own, which has looked up Python's long ago
            held.append((self._namespace, "open", opened))
        before = [holder[name] for holder, name, _ in held]

        def undo() -> None:
            for (holder, name, _), was in zip(held, before, strict=True):
                holder[name] = was
            if undo in self._undos:
                self._undos.remove(undo)

        self._undos.append(undo)
        stack.callback(undo)
        for holder, name, function in held:
            holder[name] = function

    def _will_write(self, path: Path, mode: str) -> None:
        __tracebackhide__ = True
        is_added_to = "w" not in mode and "x" not in mode and path.exists() and path.absolute() not in self._of_libraries
        if is_added_to and self._strict:
            raise DeterminismError(_REFUSED.format(f"the file {path.name} is added to"))
        if is_added_to:
            self._appended[path.name] = None
        whole = path.absolute()
        size_bytes = self._sizes.setdefault(whole, path.stat().st_size if path.exists() else None)
        if "a" not in mode and whole not in self._contents and path.is_file() and size_bytes is not None and size_bytes <= _MOST_BYTES:
            self._contents[whole] = path.read_bytes()[:size_bytes]

    def _copy(self, path: Path, copy: Path) -> None:
        """As it was before the first run, as far as that is known."""
        if path in self._contents:
            copy.write_bytes(self._contents[path])
            return
        size_bytes = self._sizes.get(path, -1)
        if size_bytes is None or not path.is_file():
            return
        shutil.copyfile(path, copy)
        if size_bytes >= 0:
            with copy.open("rb+") as file:
                file.truncate(size_bytes)


_REFUSED = "--strict: {}, and a second run cannot find that as the first one did: do it in a cell of its own"


def _opens(frame: Any) -> str:
    """Whose code opens a file, be it through `pathlib`: see `owner`."""
    while frame is not None and owner(frame.f_code.co_filename) == "python":
        frame = frame.f_back
    return "python" if frame is None else owner(frame.f_code.co_filename)
