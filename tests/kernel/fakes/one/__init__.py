"""The fake called one."""

from tests.kernel.fakes import row_of

INSTRUMENT = row_of("one")
