"""``%memmark "before fwd"``: one row of memory numbers at a named moment, and the table of all such rows."""

from argparse import BooleanOptionalAction

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]

_HERE = __name__

INSTRUMENT = Instrument(
    name="memmark",
    summary="a row of memory numbers at a named moment: allocated, reserved, driver, process, container; and what changed since the last",
    description="""Take a mark where you want to know what the memory is, such as before and after each phase of a training step.

    %memmark "before fwd"       print the row, and keep it; any expression will do: %memmark f"step {step}"
    %memmark                    all marks: a table, and a picture
    %memmark --clear            forget them
    torchdebug_magics.memmark("before fwd", force=True)     the same in a function or a script; force=False does nothing

MA and Max_MA: allocated by torch, now and at most; CA and Max_CA: reserved ("cached") by its allocator; NV: in use on the whole GPU, as
the driver says; unaccounted: of that, neither torch's nor another process's. Garbage is collected first. No peak counter is reset: a
peak that is older than the last mark is said to be.""",
    options=(
        Option("--clear", "forget all marks", {"action": "store_true"}),
        Option("--force", "take the mark (the default)", {"action": BooleanOptionalAction, "default": True}),
    ),
    view=f"{_HERE}.view:page",
    examine=f"{_HERE}.probe:mark",
    subjects="LABEL",
    says=True,
)
