"""``%%torchdebug``: all instruments that watch a training, over one cell -> the finding that explains the others -> its page."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="torchdebug",
    module=__name__,
    summary="NaN, autograd, gradients, memory and hangs together: what is wrong, and its cause; after a cell that failed, why",
    description="""Watch a cell for NaN and infinities, errors and silent faults of autograd, gradients and updates, growing memory
and hangs. One report: the finding that explains the others comes first, with the page of the magic that has it; the others are one
line each.

    %%torchdebug                above a cell
    %%torchdebug --guard 90%    ... and interrupt it at 90% of the memory limit
    %%torchdebug -o w           keep the report: w.instrument, w.finding, w.fix, w.reports
    %torchdebug                 right after a cell that failed or was stopped: the explanation, or what to run next
    %torchdebug on              watch all cells from now on, and show only what is found, until %torchdebug off
    %torchdebug fix             the cell of the last report with its fix applied, as a new cell below; of a file, the change
    %torchdebug last            the last report again; torchdebug_magics.last_session().bad holds its tensors
    %torchdebug doctor          versions, device, memory limit, display, the last verdicts
    %torchdebug display MODE    how reports are shown from now on:
                                auto     live while the cell runs, frozen at its end (as at first)
                                widget   an interactive view is left (as -w does)
                                frozen   no live view
                                text     text alone

Without a cell that failed, the line %torchdebug lists every magic, and what this machine offers. In a script, the function is
`torchdebug_magics.watch()`, and `python -m torchdebug_magics run watch train.py` watches all of it.""",
    options=(Option("--guard", "interrupt the cell when this share of the memory limit is used, such as 90%", {"metavar": "SHARE"}),),
)
