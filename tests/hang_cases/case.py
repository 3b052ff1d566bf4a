"""A cell that hangs, or only seems to, as data: what `%%hangwatch` must say about it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HangCase"]


@dataclass(frozen=True, kw_only=True)
class HangCase:
    """A cell and the truth about it, found by reading the code, never by asking the engine.

    Lines are those of the cell as it is shown, where the magic is line 1 and the first line of `cell` is line 2.
    """

    name: str
    cell: str
    """The body; it leaves no thread, process or file behind that `--stop`, or its own end, would not end."""
    setup: str = ""
    """A cell that runs before, without the magic."""
    after_s: float = 2.0
    """The value of ``--after``."""
    ends: str = "stop"
    """``"stop"``: the magic has ``--stop``, which must end it; ``"itself"``: it ends by itself.

    ``"interrupt"``: Stop is pressed at `interrupt_s`.
    """
    interrupt_s: float = 6.0
    state: tuple[str, ...] = ("stuck",)
    """Any of these is right."""
    cause: tuple[str | None, ...] = (None,)
    """Any of these is right."""
    line: tuple[int, ...] | None = None
    """Where to look (``h.location.line``): any of these is right; None where it is not judged, as in an earlier cell."""
    where: str = ""
    """A part of ``h.location.source``, judged where it is given."""
    root: str | None = None
    """``h.root.who``."""
    kind: tuple[str, ...] | None = None
    """``h.root.kind``: any of these is right."""
    edges: tuple[tuple[str, str], ...] = ()
    """(who, waits_for) pairs that must be among ``h.waits``."""
    says: tuple[str, ...] = ()
    """Each must be found, ignoring case, in the verdict, the fix, or a Wait's `what`; alternatives are separated by ``|``."""
    raises: str | None = None
    """The name of the exception in which the cell ends; ``"KeyboardInterrupt"`` for what was stopped; None for a cell that ends well."""
    needs: str = ""
    """A package that the Colab-like stack lacks."""
    source: str = ""
    """The public thread that it was rebuilt from."""
