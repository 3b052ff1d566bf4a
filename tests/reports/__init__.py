"""Real reports: what people asked in public, rebuilt with their structure and sizes, judged by the answer that they accepted."""

from __future__ import annotations

from tests.reports import blind, differing_runs, gradients, memory, nan, shape_errors, training
from tests.reports.case import ReportCase

__all__ = ["ReportCase", "all_reports"]


def all_reports() -> tuple[ReportCase, ...]:
    """Every report; those that were scored blind come last."""
    return (*nan.CASES, *shape_errors.CASES, *memory.CASES, *differing_runs.CASES, *gradients.CASES, *training.CASES, *blind.CASES)
