"""The fake called two."""

from tests.kernel.fakes import row_of

INSTRUMENT = row_of("two")
