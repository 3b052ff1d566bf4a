"""A training as a text: with one planted fault, and what must be said of it; or healthy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.instruments.gradwatch.report import GradFinding, GradKind

__all__ = ["HEAD", "Fault", "Training"]

HEAD = """\
import math, torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)

def mlp(*sizes, act=nn.ReLU):
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])

def batches(count, size=32, width=16, classes=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(width, classes, generator=generator)
    for _ in range(count):
        x = torch.randn(size, width, generator=generator)
        yield x, (x @ teacher).argmax(1)
"""


@dataclass(frozen=True)
class Training:
    """A healthy one."""

    name: str
    text: str
    doubt: str = ""
    """Why it is not called healthy although nothing is found."""

    @property
    def body(self) -> str:
        return HEAD + self.text


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault. Lines that end in ``#> here`` would be right."""

    name: str
    kind: GradKind
    text: str
    steps: tuple[int, int] = (0, 0)
    """The first and the last step that would be right."""
    modules: tuple[str | None, ...] = (None,)
    """Modules that would be right."""
    fix: str = ""
    """What the fix must hold."""

    @property
    def body(self) -> str:
        return HEAD + self.text

    def wrong(self, finding: GradFinding) -> list[str]:
        """A line for each field that is not as it must be."""
        lines = {number for number, line in enumerate(self.body.splitlines(), start=2) if line.endswith("#> here")}
        said = [f"kind: {finding.kind}, not {self.kind}"] if finding.kind != self.kind else []
        if not self.steps[0] <= finding.step <= self.steps[1]:
            said.append(f"step: {finding.step}, not {self.steps}")
        if finding.module not in self.modules:
            said.append(f"module: {finding.module!r}, not {self.modules}")
        if lines and (finding.location is None or finding.location.line not in lines):
            said.append(f"line: {finding.location}, not {lines}")
        if self.fix not in finding.fix or not finding.fix:
            said.append(f"fix: {finding.fix!r} without {self.fix!r}")
        return said
