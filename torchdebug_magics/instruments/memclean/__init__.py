"""``%memclean``: what an old error, ``Out`` and the debugger still hold, and what it costs to free it."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]

_HERE = __name__

INSTRUMENT = Instrument(
    name="memclean",
    summary="what an old error, `Out`, `_` and the debugger still hold, in bytes; frees it on request and says what that costs",
    description="""What the notebook itself still holds of your tensors, each with the bytes that freeing it would give back.

    %memclean                           only look: nothing is freed
    %memclean --free                    free all of the below but the cache
    %memclean --free exception,out      these two alone
    %memclean --free Out[3]             one output alone

exception  the last error keeps the variables of every call in its traceback; without it, `%debug` and `%tb` have nothing to work on
out        each cell's last value stays in Out[n], _n and _; without them, these names are gone
debugger   a debugger that was left keeps the frame it stood in
session    the last session of a magic of ours keeps what it found; without it, `torchdebug_magics.last_session()` is None
cycles     objects that hold each other, which Python's collector frees in its own time
heap       memory that the C library keeps after it was freed: given back to the system by malloc_trim
cache      only if named: what PyTorch's GPU allocator keeps to reuse. It is not lost to this process: the next tensor takes it. To empty it
           helps other processes on the GPU alone, and makes the next steps slower""",
    options=(
        Option(
            "--free",
            "free it: all, or names such as exception,out (see above)",
            {"nargs": "?", "const": "all", "default": "", "metavar": "NAMES"},
        ),
    ),
    view=f"{_HERE}.view:page",
    examine=f"{_HERE}.examine:examine",
)
