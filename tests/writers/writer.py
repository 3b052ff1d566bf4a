"""A row of the table: a cell that writes, and what may become of it under a magic that runs it again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Writer:
    """A notebook cell with an effect outside the variables, after an earlier cell that prepares it.

    Both see `os`, `torch`, the tensor ``n = torch.zeros(())``, `OTHER` (a second folder), and `HOST`, `PORT` and `URL` of a server that
    counts its requests. They draw random numbers or carry a variable on, so that each further run of the cell would leave something else.
    """

    name: str
    setup: str
    cell: str
    effects: tuple[str, ...]
    """What the cell touches: ``file NAME``, ``descriptor``, ``request``, ``process``, ``thread``, ``cwd``, ``environ``..."""
    expect: Literal["equal", "refused"] = "equal"
    """``equal``: as after one plain run, or the rerun is refused; ``refused``: no rerun can leave it as one run does."""
    named: tuple[str, ...] = ()
    """Words of which the reason of a refusal holds one; further to the names in `effects`."""
    finish: str = ""
    """A later cell that closes what the first opened, so that buffers are on disk before the comparison."""
    needs: str = ""
    """A module without which the row is left out."""
    slow: bool = False
    """Starts processes or imports much: run with the thorough tests only."""

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Writer:
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
