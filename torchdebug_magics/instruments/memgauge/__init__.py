"""``%%memgauge`` and ``%memgauge on``: memory use while cells run, and a guard that interrupts before memory runs out."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="memgauge",
    module=__name__,
    summary="memory while the cell runs: process, container, GPUs; growth, the exact peak, and a guard that interrupts in time",
    description="""Gauges of all memory that a cell can run out of: this process, its DataLoader workers, the limit at which the kernel is
killed (container, address space or machine), and each GPU. They are updated while the cell runs; the system counts the peak exactly.

    %%memgauge                  above a cell: live gauges, then growth, the peak and what was left
    %memgauge on                one gauge for all cells from now on
    %memgauge off               ... until here
    %%memgauge --guard 90%      interrupt the cell at 90% of the limit: the kernel stays alive, your variables are intact

The guard checks 20 times a second: a single huge allocation can still exceed the limit between two checks. CUDA is never initialized, and
no peak counter is reset.""",
    options=(Option("--guard", "interrupt the cell when this share of the memory limit is used, such as 90%", {"metavar": "SHARE"}),),
    lasting="on",
)
