"""The line of the user's where two runs begin to differ, and why: `line_tracer` -> `pairing` -> `backward_slice` -> `line_causes`."""

from torchdebug_magics.instruments.deterministic.origin.difference_search import first_difference
from torchdebug_magics.instruments.deterministic.origin.pairing import ON, Origin

__all__ = ["ON", "Origin", "first_difference"]
