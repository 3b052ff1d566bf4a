"""Every planted fault."""

from tests.unit.instruments.autograd import (
    planted_conventions,
    planted_errors,
    planted_graphs,
    planted_inplace,
    planted_leaks,
    planted_more,
    planted_silences,
)

__all__ = ["CASES"]

CASES = (
    planted_inplace.CASES
    + planted_graphs.CASES
    + planted_errors.CASES
    + planted_silences.CASES
    + planted_leaks.CASES
    + planted_more.CASES
    + planted_conventions.CASES
)
