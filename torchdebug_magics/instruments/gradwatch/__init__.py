"""``%%gradwatch``: probe -> measuring -> record -> findings -> report -> view."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="gradwatch",
    module=__name__,
    summary="each module's gradient norm, update size and zeros at every step, live, and what is wrong with the training",
    description="""Watches how a model trains: gradient norm, update-to-weight ratio and share of zero gradients of each module at each
optimizer step, as a live heatmap. Reports a training that diverges (before the loss is NaN), gradients that vanish, explode or are zero,
updates that are too small or too large, clipping of every gradient, and a loss that stays at the level of guessing. The run itself does not
change, and the device is synchronized at most once per step.

    %%gradwatch                         above a training loop
    %%gradwatch --csv steps.csv         ... and write every step, with all modules, to a file
    %gradwatch on                       from now on, in all cells, until %gradwatch off
    %%gradwatch -o g                    keep the report: g.finding, g.norms, g.ratios

Norms are measured before gradient clipping and without the scale of the GradScaler. The ratio is measured on up to 1,024 elements of
each parameter, and after 64 steps at every fourth step. Steps count from 0.""",
    options=(
        Option("--csv", "write step, module, gradient norm, update ratio and share of zeros to FILE", {"metavar": "FILE"}),
        Option("--tensorboard", "write the same, and the loss, as TensorBoard scalars to DIR", {"metavar": "DIR"}),
    ),
    lasting="on",
)
