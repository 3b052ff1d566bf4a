"""Two runs differ: the line of the user's where they begin to, and what made it so."""

from torchdebug_magics.instruments.deterministic.origin.found import ON, Origin
from torchdebug_magics.instruments.deterministic.origin.search import first_difference

__all__ = ["ON", "Origin", "first_difference"]
