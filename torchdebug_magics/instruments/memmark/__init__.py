"""``%memmark before forward``: one row of memory numbers at a named moment, and the table of all such rows."""

from argparse import BooleanOptionalAction

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="memmark",
    module=__name__,
    summary="a row of memory numbers at a named moment (allocated, reserved, driver, process, container), with changes",
    description="""Take a mark wherever you want to know the memory in use, such as before and after each phase of a training step.

    %memmark before forward     print the row, and keep it under this label
    %memmark f"step {step}"     the label can be an expression, too
    %memmark                    all marks: a table and a picture
    %memmark --clear            delete all marks
    torchdebug_magics.memmark("before forward", force=True)     the same in a function or a script; force=False does nothing

MA and Max_MA: memory allocated by PyTorch, now and at its peak; CA and Max_CA: memory reserved ("cached") by its allocator; NV: memory in
use on the whole GPU, as reported by the driver; unaccounted: the part of NV that belongs neither to PyTorch nor to another process.
Garbage is collected first. No peak counter is reset; a peak from before the last mark is labeled as older.""",
    options=(
        Option("--clear", "delete all marks", {"action": "store_true"}),
        Option("--force", "take the mark (default)", {"action": BooleanOptionalAction, "default": True}),
    ),
    subjects='"LABEL"',
)
