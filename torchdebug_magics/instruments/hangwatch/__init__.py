"""``%%hangwatch``: watch -> look at everybody -> follow the chain to the root -> cause -> report."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]

_HERE = __name__

INSTRUMENT = Instrument(
    name="hangwatch",
    summary="a cell that does not come back: who waits for whom, at which line, slow or stuck, and what to change",
    description="""Watches the running cell a few times a second. When it has made no progress for a while (no step, no new line,
no output), every thread, DataLoader worker, child process and rank is asked where it stands and what it waits for. The report follows
the waits to their root, says whether that is stuck or only slow, and what to change. It appears while the cell still hangs.

    %%hangwatch                 above a cell
    %%hangwatch --after 30      look closely only after 30 s without progress
    %%hangwatch --stop          end the cell, and the processes that it has started, once it is certainly stuck
    %hangwatch on               watch all cells from now on
    %hangwatch off              ... until here

Stop ends the cell also where it waits in native code, and ends the processes that the cell has started. If the kernel has to be
restarted, the next `%load_ext torchdebug_magics` says where it hung. For ranks that a command starts, in a terminal:
`python -m torchdebug_magics.hangwatch -- torchrun --nproc-per-node 2 train.py`""",
    options=(
        Option(
            "--after",
            "seconds without progress until it looks closely (default 10)",
            {"metavar": "N", "type": float, "default": 10.0},
        ),
        Option("--stop", "end the cell once it is certainly stuck", {"action": "store_true"}),
    ),
    probe=f"{_HERE}.probe:HangProbe",
    view=f"{_HERE}.view:page",
    over_ranks=f"{_HERE}.over_ranks:compared",
    live_view=f"{_HERE}.view:live_page",
    lasting=True,
    black_box=True,
    functions={"look": f"{_HERE}.standing:look"},
)
