"""``%stepzero``: a model's state before the first step, and how far it has moved since: state -> (file) -> movement -> report."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]

_HERE = __name__

INSTRUMENT = Instrument(
    name="stepzero",
    summary="keeps weights, buffers, optimizer and random state before training; says later what moved how far, what never did, and why",
    description="""Keeps the state before the first step, in this kernel or in a file, and compares with it later.

    %stepzero model optimizer                     keep it; further values are data, such as a batch, of which a digest is kept
    %stepzero                                     how far each parameter moved since, what never moved and why, which buffers changed
    %stepzero --restore                           weights, buffers, optimizer and random state as they were
    %stepzero --drop                              forget it
    %stepzero model optimizer --file zero.pt      write the file, or compare with it where it exists: across kernels
    %stepzero model optimizer --file zero.pt --restore      load it

The distance of a parameter is the norm of its change: absolute, relative to its norm at step zero, and, as a mean over its elements, in
learning rates. Memory is shared with the model until a step writes to it, on the CPU, where nothing else looks at that memory. A file
named *.safetensors is written in that format, where safetensors is installed; both kinds are read without running code.""",
    options=(
        Option("--file", "write this file, or compare with it where it exists", {"default": "", "metavar": "PATH"}),
        Option("--restore", "put everything back as it was at step zero", {"action": "store_true"}),
        Option("--drop", "forget what was kept", {"action": "store_true"}),
    ),
    view=f"{_HERE}.view:page",
    examine=f"{_HERE}.examine:examine",
    subjects="MODEL OPTIMIZER",
    takes_names=True,
)
