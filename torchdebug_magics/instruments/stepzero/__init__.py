"""``%stepzero``: a model's state before the first step, and how far it has moved since: state -> (file) -> movement -> report."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="stepzero",
    module=__name__,
    summary="keeps weights, buffers, optimizer and random state before training; shows later how far each parameter moved, or why not",
    description="""Keeps the state before the first step (step zero), in this kernel or in a file, and compares the training with it later.

    %stepzero model optimizer                     keep step zero; of further values, such as a batch, a digest is kept
    %stepzero                                     how far each parameter moved since, which ones never moved and why, which buffers changed
    %stepzero --restore                           restore weights, buffers, optimizer and random state
    %stepzero --drop                              forget step zero
    %stepzero model optimizer --file zero.pt      write step zero to the file; if the file exists, compare with it, also in another kernel
    %stepzero model optimizer --file zero.pt --restore      restore from the file

The distance of a parameter is the norm of its change. It is shown as it is, relative to the parameter's norm at step zero, and, as the
root mean square over its elements, in learning rates. On the CPU, memory is shared with the model until a step writes to it, unless
another tensor or array uses that memory. A file named *.safetensors needs safetensors; reading either format runs no code.""",
    options=(
        Option("--file", "write step zero to this file; if the file exists, compare with it", {"default": "", "metavar": "PATH"}),
        Option("--restore", "restore weights, buffers, optimizer and random state", {"action": "store_true"}),
        Option("--drop", "forget step zero", {"action": "store_true"}),
    ),
    subjects="MODEL OPTIMIZER",
)
