"""What the notebook itself still holds of the user's tensors, and what was freed."""

from __future__ import annotations

from dataclasses import dataclass

from torchdebug_magics.format import byte_size, capitalised
from torchdebug_magics.report import Report

_WORTH_IT = 1 << 20
"""Less is not worth freeing."""
_WORTH_TRIMMING, _LARGE_PART = 64 << 20, 0.1
"""And of the process: a heap always keeps some memory for reuse."""
_FEW = 3


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One reference of the notebook's own that holds tensors."""

    name: str
    """``"exception"``, ``"debugger"``, ``"session"``, or an output such as ``"Out[3]"``."""
    part: str
    """The word for ``--free`` that covers it."""
    what: str
    """A description, such as ``"the error of In[7]"``."""
    held_bytes: int
    """Bytes of all storages reachable from it, each counted once."""
    alone_bytes: int
    """Bytes that only this reference holds: what freeing it alone releases."""
    devices: tuple[str, ...] = ()
    cost: str = ""
    """What no longer works when it is freed."""
    others: tuple[str, ...] = ()
    """Variables that hold some of the same tensors."""


@dataclass(frozen=True, kw_only=True)
class Freed:
    """One thing that was freed."""

    name: str
    freed_bytes: int
    """Bytes of freed tensors; for the heap and the cache, bytes returned."""
    rss_bytes: int
    """By how much the process shrank; memory that the C library keeps for reuse is not included."""
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
    def title(self) -> str:
        """What is held and by what, or what was freed; the command and its cost have rows of their own."""
        return capitalised(_freed(self) if self.asked else _held(self))

    @property
    def command(self) -> str:
        """The line that frees most; empty where nothing is worth freeing."""
        if self.together_bytes < _WORTH_IT:
            return ""
        part = self.main_part
        return f"%memclean --free {part}" if part else "%memclean --free"

    @property
    def cost(self) -> str:
        """What no longer works after `command`."""
        outputs = [f"`{holding.name}`" for holding in self.main_holdings if holding.part == "out"]
        gone = [f"{_listed(outputs) if len(outputs) <= _FEW else 'the outputs'} will be gone"] if outputs else []
        return _listed([*dict.fromkeys(holding.cost for holding in self.main_holdings if holding.part != "out"), *gone])

    @property
    def main_part(self) -> str:
        """The one word for ``--free`` that frees everything; empty where it takes several."""
        part = max(self.by_part, key=lambda one: self.by_part[one], default="")
        return "" if not part or self.by_part[part] < self.together_bytes else part

    @property
    def main_holdings(self) -> tuple[Holding, ...]:
        """What `command` frees."""
        part = self.main_part
        return tuple(holding for holding in self.holdings if holding.part == part) if part else self.holdings

    @property
    def heap_is_large(self) -> bool:
        """Whether the C library keeps enough freed memory to return it."""
        return self.heap_bytes >= max(_WORTH_TRIMMING, _LARGE_PART * self.rss_bytes)

    def rows(self) -> tuple[tuple[str, str], ...]:
        """What frees it and what that costs, by name; then what belongs to no variable and can be freed, too."""
        if self.asked:
            known = [("cost", ", and ".join(dict.fromkeys(one.cost for one in self.freed if one.cost)))]
        else:
            known = [("fix", f"`{self.command}`"), ("cost", self.cost)] if self.command else []
        if self.cycles_bytes:
            cycle = f" (`{self.cycle}`)" if self.cycle else ""
            known.append(("cycles", f"{byte_size(self.cycles_bytes)}{cycle}; `%memclean --free cycles` frees them"))
        if self.heap_is_large:
            kept = f"keeps {byte_size(self.heap_bytes)} of freed memory"
            known.append(("C library", f"{kept}; `%memclean --free heap` returns it to the system"))
        return tuple((name, text) for name, text in known if text)

    @property
    def verdict(self) -> str:
        """What is held, by what, how to free it and what that costs; or what was freed."""
        return " · ".join([self.title, *(f"{name}: {text}" for name, text in self.rows())])


def _held(report: MemcleanReport) -> str:
    if not report.holdings:
        return "nothing to clean: no old error, output or debugger holds a tensor"
    if not report.together_bytes:
        return "nothing to gain: your variables hold everything that old errors and outputs hold"
    size = byte_size(report.together_bytes)
    if report.together_bytes < _WORTH_IT:
        return f"nothing worth freeing: old errors and outputs hold {size} of tensors"
    return f"{_whats(report.main_holdings)} hold{'s' if len(report.main_holdings) == 1 else ''} {size}"


def _whats(holdings: tuple[Holding, ...]) -> str:
    """Who holds it; many outputs by their number."""
    outputs = [holding.what for holding in holdings if holding.part == "out"]
    many = [f"{len(outputs)} outputs ({outputs[0]} the most)"] if len(outputs) > _FEW else outputs
    return _listed([*(holding.what for holding in holdings if holding.part != "out"), *many])


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _freed(report: MemcleanReport) -> str:
    sizes = ", ".join(
        f"{one.name} {byte_size(one.freed_bytes)}{f' (`{one.cycle}`)' if one.cycle else ''}" for one in report.freed if one.freed_bytes
    )
    if sizes:
        return f"freed {sizes}"
    others = list(dict.fromkeys(name for holding in report.holdings for name in holding.others))[:_FEW]
    held = _listed([f"`{name}`" for name in others])
    verb = "holds" if len(others) == 1 else "hold"
    return f"nothing was freed: {held} still {verb} the tensors" if others else "nothing was freed"
