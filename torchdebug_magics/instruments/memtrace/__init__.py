"""``%%memtrace``: who holds the memory, when it peaks, and what leaks: ``ledger -> growth -> held -> conclude -> report -> view``."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]

_HERE = __name__

INSTRUMENT = Instrument(
    name="memtrace",
    summary="who holds the memory, when it peaks, which variable keeps what leaks, and what would help when it runs out",
    description="""Every torch byte of a cell, by the line and module that asked for it and by what it is: parameter, gradient, optimizer
state, activation, buffer, temporary. What goes on growing is named by the variable that keeps it, with what to change; when memory runs
out, what would help here, and by how much.

    %%memtrace                  above a cell
    %%memtrace --light          phases, growth and gauges alone, at next to no cost
    %%memtrace --every-step     of a long loop, follow every step op by op
    %%memtrace --guard 90%      interrupt the cell at 90% of the limit: the kernel lives, and the report tells what had grown
    %%memtrace --snapshot mem_{rank}.pickle     write a file for pytorch.org/memory_viz: CUDA's own history, or that of the trace
    %memtrace --compare a b     two reports that were kept with -o, side by side: which peaks lower, and of what there is less

Of a loop, the first steps are followed op by op, and later ones in which a counter says something new; the others are only counted.
A `%memmark` in the cell is marked in the picture.
Nothing is computed differently, CUDA is not initialised, and no peak counter of torch's is reset.""",
    options=(
        Option("--light", "phases, growth and gauges alone", {"action": "store_true"}),
        Option("--every-step", "follow every step of a loop op by op", {"action": "store_true"}),
        Option("--guard", "interrupt the cell when so much of the limit is used, such as 90%", {"metavar": "SHARE"}),
        Option(
            "--snapshot",
            "write the history of allocations for pytorch.org/memory_viz; {rank} in the name is replaced",
            {"metavar": "FILE.pickle"},
        ),
        Option("--compare", "on a line of its own: two reports that were kept with -o, side by side", {"action": "store_true"}),
    ),
    probe=f"{_HERE}.probe:MemtraceProbe",
    view=f"{_HERE}.view:page",
    over_ranks=f"{_HERE}.over_ranks:compared",
    live_view=f"{_HERE}.view:live_page",
    black_box=True,
    examine=f"{_HERE}.comparison:compared",
    subjects="A B",
    takes_names=True,
    reruns=True,
)
