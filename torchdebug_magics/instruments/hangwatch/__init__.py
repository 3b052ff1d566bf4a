"""``%%hangwatch``: watch -> look at everybody -> follow the chain to the root -> cause -> report."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="hangwatch",
    module=__name__,
    summary="a cell that does not return: who waits for whom, at which line, slow or stuck, and what to change",
    description="""Samples the running cell a few times a second. When the cell makes no progress for a while (no step, no new line, no
output), it asks every thread, DataLoader worker, child process and rank for its line and what it waits for. The report follows the waits
to their root, says whether the root is stuck or only slow, and what to change. It appears while the cell still hangs.

    %%hangwatch                 above a cell
    %%hangwatch --after 30      inspect all threads and processes after 30 s without progress
    %%hangwatch --stop          end the cell and the processes that it started once it is certainly stuck
    %hangwatch on               watch all cells from now on
    %hangwatch off              ... until here
    %hangwatch                  after a cell that you have stopped: the loop that would not have ended

Stop also ends a cell that waits in native code, and the processes that the cell started. If you have to restart the kernel, the next
`%load_ext torchdebug_magics` says where it hung. For ranks started by a command in a terminal:
`python -m torchdebug_magics.hangwatch -- torchrun --nproc-per-node 2 train.py`""",
    options=(
        Option(
            "--after",
            "seconds without progress before all threads and processes are inspected (default 10)",
            {"metavar": "N", "type": float, "default": 10.0},
        ),
        Option("--stop", "end the cell once it is certainly stuck", {"action": "store_true"}),
    ),
    lasting="on",
)
