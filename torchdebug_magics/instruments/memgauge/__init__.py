"""``%%memgauge`` and ``%memgauge on``: how full every memory is while cells run, and a guard that stops in time."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]

_HERE = __name__

INSTRUMENT = Instrument(
    name="memgauge",
    summary="memory while the cell runs: process, container, GPUs; the exact peak, and a guard that interrupts before the kernel is killed",
    description="""Gauges of every memory that a cell can run out of: this process, its DataLoader workers, the limit at which the kernel is
killed (container, address space or machine), and each GPU. They move while the cell runs; the peak is counted by the system, not sampled.

    %%memgauge                  above a cell: live gauges, then the peak and what was left
    %memgauge on                one gauge from now on, over all cells
    %memgauge off               ... until here
    %%memgauge --guard 90%      interrupt the cell at 90% of the limit: the kernel lives, and the variables are there

The guard looks ten times a second: one huge allocation can still jump over it. CUDA is never initialised, and no counter of torch's
is reset.""",
    options=(Option("--guard", "interrupt the cell when so much of the limit is used, such as 90%", {"metavar": "SHARE"}),),
    probe=f"{_HERE}.probe:GaugeProbe",
    view=f"{_HERE}.view:page",
    over_ranks=f"{_HERE}.over_ranks:compared",
    live_view=f"{_HERE}.view:live_page",
    lasting=True,
    black_box=True,
    after_cell=f"{_HERE}.view:after_cell",
)
