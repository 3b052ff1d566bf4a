"""Every planted fault, and those that are not answered so far."""

from tests.unit.instruments.autograd import planted_errors, planted_graphs, planted_inplace, planted_leaks, planted_more, planted_silences

__all__ = ["CASES", "PLANTED", "UNANSWERED"]

PLANTED = (
    planted_inplace.CASES + planted_graphs.CASES + planted_errors.CASES + planted_silences.CASES + planted_leaks.CASES + planted_more.CASES
)
UNANSWERED = frozenset(
    {
        "a NumPy buffer holds the next batch before backward",  # no op writes it, so no write is seen
        "the embeddings of GPT-2 are resized after the optimizer was made",
    }
)
CASES = tuple(case for case in PLANTED if case.name not in UNANSWERED)
