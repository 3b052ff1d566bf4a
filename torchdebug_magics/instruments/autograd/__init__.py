"""``%%autograd``: record the first steps -> the error or the silent fault -> the line that caused it -> report."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]

_HERE = __name__

INSTRUMENT = Instrument(
    name="autograd",
    summary="the line that broke the backward pass, and the training that fails without an error",
    description="""Explains the errors of backward(), and finds what fails in silence: parameters without a gradient, an optimizer that
holds other tensors than the model, a tensor that was overwritten after an op saved it, samples of a batch that leak into one another,
steps in the wrong order.

The first two steps are recorded op by op, with lines; after them the loop runs at full speed.

    %%autograd                  above a cell
    %%autograd --every-step     record every step: for an error that comes later
    %autograd                   right after a cell that failed: why, and which line to change; nothing is run again
    %autograd loss              what this loss reaches: parameters, saved memory, cuts""",
    options=(Option("--every-step", "record every step", {"action": "store_true"}),),
    probe=f"{_HERE}.probe:AutogradProbe",
    view=f"{_HERE}.view:page",
    live_view=f"{_HERE}.view:live_page",
    examine=f"{_HERE}.loss_reach:examine",
    subjects="LOSS",
    takes_names=True,
    after_error=f"{_HERE}.failed_cell:after_error",
)
