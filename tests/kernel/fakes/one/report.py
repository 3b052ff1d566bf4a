"""What both fakes report."""

from __future__ import annotations

from dataclasses import dataclass

from torchdebug_magics.report import Report


@dataclass(frozen=True, kw_only=True)
class FakeReport(Report):
    name: str
    error: str = ""

    @property
    def verdict(self) -> str:
        return f"verdict of {self.name}{self.error}"
