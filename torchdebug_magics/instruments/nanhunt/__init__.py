"""``%%nanhunt``: the exact op, line and step of the first NaN or infinity."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="nanhunt",
    module=__name__,
    summary="the op, line, row and cause of the first NaN or inf, at almost no cost",
    description="""Watch a training or inference cell for NaN and inf.

While all values are finite, this costs one reduction over the loss and the gradients per backward(). The first bad step is replayed op
by op, and the cell stops with a NonFiniteError. The report names the op, the module, your line, the row and the fix: your code,
changed, and rerun to check that the step is then finite. The parameters are as they were before the bad step.

    %%nanhunt                   stop at the first finding
    %%nanhunt -o hunt           ... and keep the report in `hunt`
    %%nanhunt --keep-going      only record
    %nanhunt loss               examine a tensor that you already have, before backward()""",
    options=(
        Option("--keep-going", "record findings and never stop the cell", {"action": "store_true"}),
        Option(
            "--max-findings",
            "investigate at most N findings (default 10; only with --keep-going)",
            {"type": int, "default": 10, "metavar": "N"},
        ),
        Option("--layers", "show the outputs and gradients of every module call, also without a finding", {"action": "store_true"}),
        Option("--anyway", "replay a step even if it does what cannot be undone, such as a request", {"action": "store_true"}),
    ),
    subjects="LOSS",
)
