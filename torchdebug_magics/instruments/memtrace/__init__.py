"""``%%memtrace``: what holds memory, when it peaks, what leaks: ``ledger -> growth -> held -> probe -> report -> view``."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="memtrace",
    module=__name__,
    summary="which lines and variables hold memory, when it peaks, what leaks and why, and what helps when it runs out",
    description="""Every byte that PyTorch allocates in a cell, by line, by module and by kind: parameter, gradient, optimizer state,
activation, buffer, temporary. A leak is reported with the variable that keeps the memory and the fix; an out-of-memory error with what
would help, and how many bytes it would save.

    %%memtrace                  above a cell
    %%memtrace --light          only phases, growth and gauges, at almost no cost
    %%memtrace --every-step     trace every step of a long loop op by op
    %%memtrace --guard 90%      interrupt the cell at 90% of the limit: the kernel stays alive, and the report shows what grew
    %%memtrace --snapshot mem_{rank}.pickle     write a file for pytorch.org/memory_viz: CUDA's history, or that of the trace
    %memtrace --compare a b     compare two reports that were kept with -o: which one peaks lower, and why

The first steps of a loop are traced op by op, and so are later steps whose memory changes; only the memory of the others is counted.
A `%memmark` in the cell is marked in the picture.
The results do not change, CUDA is not initialized, and no peak counter is reset.""",
    options=(
        Option("--light", "only phases, growth and gauges", {"action": "store_true"}),
        Option("--every-step", "trace every step of a loop op by op", {"action": "store_true"}),
        Option("--guard", "interrupt the cell when this share of the memory limit is used, such as 90%", {"metavar": "SHARE"}),
        Option(
            "--snapshot",
            "write the history of allocations for pytorch.org/memory_viz; {rank} in the name is replaced by the rank",
            {"metavar": "FILE.pickle"},
        ),
        Option("--compare", "on a line of its own: compare two reports that were kept with -o", {"action": "store_true"}),
    ),
    subjects="A B",
)
