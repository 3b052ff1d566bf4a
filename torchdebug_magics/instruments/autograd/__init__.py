"""``%%autograd``: record the first steps -> the error or the silent fault -> the line that caused it -> report."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="autograd",
    module=__name__,
    summary="the line that broke the backward pass, and faults of a training that raise no error",
    description="""Explains errors of backward(), and finds faults that raise no error: parameters without a gradient, an optimizer that
does not hold the model's parameters, a tensor overwritten after an op saved it for backward, samples of a batch that affect each other,
and backward(), step() and zero_grad() in the wrong order.

The first two optimizer steps are recorded op by op, with their lines; after them the loop runs at full speed.

    %%autograd                  above a cell
    %%autograd --every-step     record every step, for an error late in the loop
    %autograd                   right after a cell that failed: the cause and the line to change; nothing runs again
    %autograd loss              what the loss reaches: parameters, memory saved for backward, the lines that cut its graph""",
    options=(Option("--every-step", "record every step, not only the first two; the whole loop is slower", {"action": "store_true"}),),
    subjects="LOSS",
)
