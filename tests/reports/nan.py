"""Losses that became NaN: what people asked, and what it was."""

from __future__ import annotations

from tests.reports.case import ReportCase

CASES: tuple[ReportCase, ...] = (
    ReportCase(
        name="probe",
        source="https://x/y",
        answer="log of 0",
        magic="nanhunt",
        cells=(
            "x = torch.zeros(3, requires_grad=True)",
            """
            %%nanhunt -o r
            loss = torch.log(x).sum() * 0  # <- here
            loss.backward()
            """,
        ),
        op=("log",),
        fix="clamp",
        fixed=(("torch.log(x)", "torch.log(x.clamp(min=1e-6))"),),
        works="bool(torch.isfinite(loss))",
    ),
)
