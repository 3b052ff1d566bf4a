"""``%memclean``: look, free what was asked for, and measure what that gave back."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.memclean import release
from torchdebug_magics.instruments.memclean.census import Census, collect
from torchdebug_magics.instruments.memclean.report import Freed, MemcleanReport
from torchdebug_magics.instruments.memclean.survey import Survey, survey
from torchdebug_magics.machine.heap_trim import trim_heap, trimmable_bytes
from torchdebug_magics.machine.process import rss_bytes
from torchdebug_magics.probing.holders.roots import outputs
from torchdebug_magics.probing.shell import running_shell

__all__ = ["examine"]

_ALL = ("cycles", "exception", "debugger", "out", "session", "heap")
_NAMES = (*_ALL, "cache")
_ONE_OUTPUT = re.compile(r"Out\[(\d+)\]$")
_COSTS = {"exception": "`%debug` has no error to work on now", "out": "`Out` is empty now"}


def examine(*, free: str = "") -> MemcleanReport:
    """What is held, or, with `free`, what of it became free: ``"all"``, or names as in ``"exception,out"``."""
    asked, shell = _asked(free), running_shell()
    before = survey()
    problems = (
        [] if before.is_whole else ["not every object could be visited within the budget: some references may hold more than is shown here"]
    )
    freed: list[Freed] = []
    if asked:
        cleaner = _Cleaner(shell, before, problems)
        freed = [cleaner.free(name) for name in asked]
    after = survey() if asked else before
    cycles_bytes, cycle = (0, "") if asked else Census(before.storages).waiting()
    return MemcleanReport(
        holdings=after.holdings,
        together_bytes=after.together_bytes,
        by_part=after.by_part,
        cycles_bytes=cycles_bytes,
        cycle=cycle,
        heap_bytes=0 if asked else trimmable_bytes() or 0,
        freed=tuple(freed),
        asked=asked,
        rss_bytes=rss_bytes(),
        cache_bytes=release.cached_bytes(),
        problems=tuple(problems),
    )


def _asked(free: str) -> tuple[str, ...]:
    """The names in the order in which they are freed: what the collector has waiting for it comes first, as it is nobody's."""
    words = free.replace(",", " ").split()
    for word in words:
        if word not in {"all", *_NAMES} and not _ONE_OUTPUT.match(word):
            msg = f"--free takes all, {', '.join(_NAMES)}, or an output such as Out[3], not {word!r}"
            raise TorchDebugError(msg)
    if not words:
        return ()
    wanted = {*words, *(_ALL if "all" in words else ()), "cycles"}
    return (*(name for name in _NAMES if name in wanted), *dict.fromkeys(word for word in words if _ONE_OUTPUT.match(word)))


class _Cleaner:
    """Frees one thing after the other, and measures each."""

    def __init__(self, shell: Any | None, before: Survey, problems: list[str]) -> None:
        self._shell = shell
        self._problems = problems
        self._census = Census(before.storages)
        self._ways: dict[str, Callable[[], int | None]] = {
            "cycles": lambda: None,
            "exception": lambda: release.forget_error(shell),
            "debugger": lambda: release.forget_debugger(shell),
            "out": self._outputs,
            "session": lambda: release.forget_session(shell),
            "heap": self._heap,
            "cache": self._cache,
        }

    def free(self, name: str) -> Freed:
        """Let go of it, collect, and see what is gone."""
        one = _ONE_OUTPUT.match(name)
        rss = rss_bytes()
        given_back = self._outputs(int(one[1])) if one else self._ways[name]()
        cycle = self._census.collect() if name == "cycles" else ""
        collect()
        gone = self._census.gone_bytes()
        cost = f"`{name}` is gone now" if one else _COSTS.get(name, "")
        return Freed(
            name=name,
            freed_bytes=gone if given_back is None else given_back,
            rss_bytes=rss - rss_bytes(),
            cost=cost if gone else "",
            cycle=cycle,
        )

    def _outputs(self, only: int | None = None) -> int | None:
        if self._shell is None:
            self._note("no IPython runs here, so there are no outputs to free")
        elif only is not None and only not in outputs(self._shell):
            self._note(f"there is no Out[{only}]")
        else:
            release.forget_outputs(self._shell, only)
        return None

    def _heap(self) -> int:
        rss = rss_bytes()
        if not trim_heap():
            self._note("this system's C library has no malloc_trim, so the heap was left as it is")
        return max(0, rss - rss_bytes())

    def _cache(self) -> int:
        given_back = release.empty_cache()
        if given_back is None:
            self._note("CUDA is not in use in this process, so there is no GPU cache to empty")
        return given_back or 0

    def _note(self, problem: str) -> None:
        self._problems.append(problem)
