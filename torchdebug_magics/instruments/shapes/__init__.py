"""``%shapes`` and ``%%shapes``: the shape of everything, before it runs and where it breaks."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]

_HERE = __name__

INSTRUMENT = Instrument(
    name="shapes",
    summary="every module's shapes, parameters, FLOPs and memory without computing; where the forward breaks, and a fix that was tried",
    description="""The table of a model's modules, from a run on tensors without data: nothing is computed, and the model stays as it was.

    %shapes model x                     values, as in a call: x mask=mask, **batch, (1, 3, 224, 224), {"input_ids": ids}
    %shapes model(x, mask=mask)         the same as model x mask=mask: the call is not made
    %shapes model                       parameters only
    %shapes                             after a cell that failed: why, and what to change
    %%shapes                            above a cell: every module called in it

Where the forward breaks, the rows up to there are shown, where the mismatching size came from, and a fix that was tried on a copy.""",
    options=(
        Option("--depth", "show modules down to depth N", {"type": int, "metavar": "N"}),
        Option("--columns", "the columns to show, such as output,params,flops", {"default": "", "metavar": "NAMES"}),
        Option("--sort", "sort by a column, largest first", {"default": "", "metavar": "COLUMN"}),
        Option("--real", "compute for real", {"action": "store_true"}),
        Option("--symbolic", "sizes as formulas of the input's: (B, T, 4*D)", {"action": "store_true"}),
        Option("--plot", "a picture of where parameters, FLOPs and activations sit", {"action": "store_true"}),
        Option("--strict", "end the cell in the error of the forward", {"action": "store_true"}),
    ),
    probe=f"{_HERE}.probe:ShapesProbe",
    view=f"{_HERE}.view:page",
    over_ranks=f"{_HERE}.over_ranks:compared",
    live_view=None,
    examine=f"{_HERE}.examine:examine",
    subjects="MODEL INPUT",
    takes_keywords=True,
    called="torchdebug_magics.probing.dry_runs.inputs:model_of",
    after_error=f"{_HERE}.postmortem:after_error",
)
