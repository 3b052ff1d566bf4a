"""``%shapes`` and ``%%shapes``: shapes and costs of every module; where the forward fails, the cause and a verified fix."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="shapes",
    module=__name__,
    summary="shapes, parameters, FLOPs and memory of every module, without computing; if the forward fails, the cause and a verified fix",
    description="""Shows a table of a model's modules, from a run on tensors without data: nothing is computed, the model is not changed.

    %shapes model x                     values, as in a call: x mask=mask, **batch, (1, 3, 224, 224), {"input_ids": ids}
    %shapes model(x, mask=mask)         the same as model x mask=mask: the call is not made
    %shapes model                       parameters only
    %shapes                             after a cell that failed: the cause, and what to change
    %%shapes                            above a cell: every module that the cell calls

If the forward fails, the report shows the line, the origin of the mismatching size, and a fix that was verified on a copy of the model.""",
    options=(
        Option("--depth", "show modules down to depth N", {"type": int, "metavar": "N"}),
        Option("--columns", "columns to show, such as output,params,flops", {"default": "", "metavar": "NAMES"}),
        Option("--sort", "sort by a column, largest first", {"default": "", "metavar": "COLUMN"}),
        Option("--real", "run the forward on real tensors", {"action": "store_true"}),
        Option("--symbolic", "show sizes as formulas of the input's: (B, T, 4*D)", {"action": "store_true"}),
        Option("--plot", "show the shares of parameters, FLOPs and activations as a picture", {"action": "store_true"}),
        Option("--strict", "raise the error of the forward in the cell", {"action": "store_true"}),
    ),
    subjects="MODEL INPUT NAME=VALUE",
)
