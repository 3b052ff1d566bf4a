"""``%memclean``: what an old error, ``Out`` and the debugger still hold, and what freeing it costs."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="memclean",
    module=__name__,
    summary="tensors that an old error, `Out`, `_` and the debugger still hold, in bytes; frees them on request and reports the cost",
    description="""Tensors that the notebook itself still holds, with the bytes that freeing each of them would release.

    %memclean                           only report: nothing is freed
    %memclean --free                    free everything below except the cache
    %memclean --free exception,out      free only these two
    %memclean --free Out[3]             free only one output

exception  the last error keeps the variables of every call in its traceback; once it is freed, `%debug` and `%tb` no longer work on it
out        each cell's last value stays in Out[n], _n and _; once they are freed, these names are undefined
debugger   a debugger that was closed keeps the frame in which it stopped
session    the last session of a torchdebug_magics magic keeps its report; once it is freed, `torchdebug_magics.last_session()` is None
cycles     objects that refer to each other, which Python's garbage collector frees only when it runs
heap       freed memory that the C library keeps: malloc_trim returns it to the system
cache      only if named: memory that PyTorch's GPU allocator keeps for reuse. It is not lost to this process: the next tensor takes it.
           Emptying it helps only other processes on the GPU, and makes the next steps slower""",
    options=(
        Option(
            "--free",
            "free everything, or only the named parts, such as exception,out (see above)",
            {"nargs": "?", "const": "all", "default": "", "metavar": "NAMES"},
        ),
    ),
)
