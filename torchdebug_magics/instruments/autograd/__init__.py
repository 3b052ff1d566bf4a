"""``%%autograd``: record the first steps -> the error or the silent fault -> the line that caused it -> report."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]

_HERE = __name__

INSTRUMENT = Instrument(
    name="autograd",
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
    probe=f"{_HERE}.probe:AutogradProbe",
    view=f"{_HERE}.view:page",
    over_ranks=f"{_HERE}.report:compared",
    live_view=f"{_HERE}.view:live_page",
    examine=f"{_HERE}.loss_reach:examine",
    subjects="LOSS",
    takes_names=True,
    after_error=f"{_HERE}.loss_reach:after_error",
)
