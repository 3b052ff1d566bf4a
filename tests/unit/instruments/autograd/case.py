"""A program with one planted fault of autograd, and what must be said about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.report import AutogradFinding, Kind
    from torchdebug_magics.report import Location

__all__ = ["HEAD", "Case"]

HEAD = """\
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
"""
"""How each program begins."""
_MARK = re.compile(r"#> (?P<fields>[a-z, ]+)$")
_MARKED = {"location": "location", "saved": "saved_at", "first": "first_backward_at", "shared": "shared_from"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One planted fault.

    A line that ends in ``#> location`` is the one to change; ``saved``, ``first`` and ``shared`` mark `saved_at`, `first_backward_at` and
    `shared_from`. Where several lines bear the same mark, any of them will do.
    """

    name: str
    kind: Kind
    text: str
    edits: tuple[tuple[str, str], ...] = ()
    """What the accepted answer replaces; nothing is found afterwards. Empty where no small edit would do."""
    ops: tuple[str, ...] = ()
    """ATen names that would be right; empty where it is left open."""
    tensors: tuple[str, ...] = ()
    """Names that would be right."""
    module: str | None = None
    parameters: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ()
    """Kinds that would be right as well."""
    also: tuple[Kind, ...] = ()
    """Other silent faults that the same program truly has."""
    door: str = ""
    """The only one through which it is tested, where it needs the variables of a notebook."""
    link: str = ""
    """The thread that it was rebuilt from."""

    @property
    def body(self) -> str:
        return HEAD + self.text

    @property
    def fixed(self) -> str:
        """The body after the cure."""
        body = self.body
        for old, new in self.edits:
            if body.count(old) != 1:
                message = f"{self.name}: {body.count(old)} times {old!r}"
                raise ValueError(message)
            body = body.replace(old, new)
        return body

    def lines(self, mark: str) -> set[int]:
        """The marked lines, numbered as in the cell: the body begins at line 2."""
        found = ((number, _MARK.search(line)) for number, line in enumerate(self.body.splitlines(), start=2))
        return {number for number, match in found if match and mark in match["fields"].split(", ")}

    def wrong(self, finding: AutogradFinding) -> list[str]:
        """A line for each field that is not as it must be."""
        said = [f"kind: {finding.kind}, not {self.kind}"] if finding.kind not in {self.kind, *self.kinds} else []
        for mark, name in _MARKED.items():
            place: Location | None = getattr(finding, name)
            if (lines := self.lines(mark)) and (place is None or place.line not in lines):
                said.append(f"{name}: {place and place.line}, not {' or '.join(map(str, sorted(lines)))}")
        if self.ops and (finding.op or "").rstrip("_") not in {op.rstrip("_") for op in self.ops}:
            said.append(f"op: {finding.op}, not {' or '.join(self.ops)}")
        if self.tensors and finding.tensor not in self.tensors:
            said.append(f"tensor: {finding.tensor}, not {' or '.join(self.tensors)}")
        if self.module is not None and finding.module != self.module:
            said.append(f"module: {finding.module}, not {self.module}")
        if self.parameters and set(finding.parameters) != set(self.parameters):
            said.append(f"parameters: {sorted(finding.parameters)}, not {sorted(self.parameters)}")
        return said
