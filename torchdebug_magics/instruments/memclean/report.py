"""What the notebook holds of the user's tensors, and what became free."""

from __future__ import annotations

from dataclasses import dataclass

from torchdebug_magics.format import byte_size, capitalised
from torchdebug_magics.report import Report

__all__ = ["Freed", "Holding", "MemcleanReport"]

_WORTH_IT = 1 << 20
"""Below, nobody waits for it."""
_WORTH_TRIMMING, _LARGE_PART = 64 << 20, 0.1
"""And of the process: a heap always keeps some, to be used again."""
_FEW = 3


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One thing of the notebook's that holds tensors."""

    name: str
    """``"exception"``, ``"debugger"``, ``"session"``, or an output such as ``"Out[3]"``."""
    part: str
    """The word for ``--free`` that covers it."""
    what: str
    """In words, such as ``"the error of In[7]"``."""
    held_bytes: int
    """Of all storages that it leads to, each counted once."""
    alone_bytes: int
    """Of those that nothing else holds: what freeing this one alone releases."""
    devices: tuple[str, ...] = ()
    cost: str = ""
    """What no longer works when it is freed."""
    others: tuple[str, ...] = ()
    """The names of variables that hold some of it, too."""


@dataclass(frozen=True, kw_only=True)
class Freed:
    """One thing that was freed."""

    name: str
    freed_bytes: int
    """Of tensors that are gone; for the heap and the cache, what was given back."""
    rss_bytes: int
    """By how much the process became smaller; what the C library keeps for later does not count."""
    cost: str = ""
    cycle: str = ""
    """Of ``cycles``: by which references the most of it held itself, such as ``Node.children[0] -> Node.parent``."""


@dataclass(frozen=True, kw_only=True)
class MemcleanReport(Report):
    """What is held, largest first; after ``--free``, what is still held, and what was freed, in order."""

    holdings: tuple[Holding, ...] = ()
    together_bytes: int = 0
    """What freeing all of `holdings` releases; more than their sum where two of them hold the same."""
    by_part: dict[str, int]
    """What freeing a part alone releases: that of ``out`` is what all outputs release together."""
    cycles_bytes: int = 0
    """Of tensors that only Python's collector frees: what `--free cycles` would release, found without a collection; 0 after `--free`."""
    cycle: str = ""
    """By which references the most of that holds itself."""
    heap_bytes: int = 0
    """What `--free heap` would give back to the system: measured in a copy of the process, which was trimmed; 0 after `--free`."""
    freed: tuple[Freed, ...] = ()
    asked: tuple[str, ...] = ()
    """What was to be freed."""
    rss_bytes: int = 0
    """Of the process, at the end."""
    cache_bytes: int = 0
    """What PyTorch's GPU allocator keeps to reuse."""

    @property
    def freed_bytes(self) -> int:
        """In all, of tensors."""
        return sum(one.freed_bytes for one in self.freed if one.name not in {"heap", "cache"})

    @property
    def verdict(self) -> str:
        """What is held, by whom, how to free it and what that costs; or what was freed."""
        return capitalised(_after(self) if self.asked else "; ".join([_before(self), *_besides(self)]))


def _before(report: MemcleanReport) -> str:
    if not report.holdings:
        return "nothing to clean: no old error, output or debugger holds a tensor"
    if not report.together_bytes:
        return "nothing to gain: what old errors and outputs hold is held by your variables, too"
    size = byte_size(report.together_bytes)
    if report.together_bytes < _WORTH_IT:
        return f"nothing worth freeing: old errors and outputs hold {size} of tensors"
    part = max(report.by_part, key=lambda one: report.by_part[one], default="")
    if not part or report.by_part[part] < report.together_bytes:
        return f"{size} are held by {_whats(report.holdings)}: `%memclean --free` frees them, and {_costs(report.holdings)}"
    found = tuple(one for one in report.holdings if one.part == part)
    return f"{size} are held by {_whats(found)}: `%memclean --free {part}` frees them, and {_costs(found)}"


def _besides(report: MemcleanReport) -> list[str]:
    """What is nobody's, and would be given back, too."""
    said = []
    if report.cycles_bytes >= _WORTH_IT:
        said.append(f"reference cycles (`{report.cycle}`) hold {byte_size(report.cycles_bytes)}: `%memclean --free cycles` frees them")
    if report.heap_bytes >= max(_WORTH_TRIMMING, _LARGE_PART * report.rss_bytes):
        said.append(f"the C library keeps {byte_size(report.heap_bytes)} that were freed: `%memclean --free heap` gives them back")
    return said


def _whats(holdings: tuple[Holding, ...]) -> str:
    """Who holds it; many outputs by their number."""
    outputs = [one.what for one in holdings if one.part == "out"]
    many = [f"{len(outputs)} outputs ({outputs[0]} the most)"] if len(outputs) > _FEW else outputs
    return _listed([*(one.what for one in holdings if one.part != "out"), *many])


def _costs(holdings: tuple[Holding, ...]) -> str:
    outputs = [one.name for one in holdings if one.part == "out"]
    gone = [f"{_listed([f'`{name}`' for name in outputs]) if len(outputs) <= _FEW else 'the outputs'} will be gone"] if outputs else []
    return _listed([*dict.fromkeys(one.cost for one in holdings if one.part != "out"), *gone])


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _after(report: MemcleanReport) -> str:
    sizes = ", ".join(
        f"{one.name} {byte_size(one.freed_bytes)}{f' (`{one.cycle}`)' if one.cycle else ''}" for one in report.freed if one.freed_bytes
    )
    if not sizes:
        others = list(dict.fromkeys(name for one in report.holdings for name in one.others))
        held = (
            f"; {', '.join(f'`{name}`' for name in others[:3])} still hold{'s' if len(others) == 1 else ''} what is left" if others else ""
        )
        return f"nothing became free{held}"
    costs = ", and ".join(dict.fromkeys(one.cost for one in report.freed if one.cost))
    return f"freed {sizes}{f'; {costs}' if costs else ''}"
