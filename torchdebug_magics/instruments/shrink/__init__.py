"""``%shrink``: two layers instead of forty-eight, in a live model: stacks -> settings -> edits -> dry forward -> report."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]

_HERE = __name__

INSTRUMENT = Instrument(
    name="shrink",
    summary="a live model with two layers instead of forty-eight, one of each kind kept, proven by a forward; `--undo` gives all back",
    description="""Takes layers out of a live model, in place, so that what fails in the large model is debugged in a small one.

    %shrink model                       two layers in each stack of layers
    %shrink model x --layers 4          four; the proof runs on this input, as in a call: x mask=mask, **batch, (1, 3, 224, 224)
    %shrink model --skip-attention      attention runs in the last layer only
    %shrink model --undo                the same layers, as they were before

The stacks are found by themselves (T5 and Whisper have two), and one layer of each kind stays: full and sliding attention, dense and
routed. Layer numbers and the model's configuration follow; experts stay. A forward before and after, on tensors without data, proves that
the model still runs; where it does not, everything is put back and the reason is shown. Without an input, a small one is made up.

The layers that were taken out stay in memory for `--undo`. A model on `meta` is shrunk before its weights exist: `--device cuda` then
makes them, and initializes them as the model does.""",
    options=(
        Option(
            "--layers",
            "layers to keep in each stack (2); one of each kind at least",
            {"type": int, "default": 2, "metavar": "N"},
        ),
        Option("--skip-attention", "run attention in the last layer only; elsewhere, pass a tensor of its shape", {"action": "store_true"}),
        Option("--undo", "give all layers back", {"action": "store_true"}),
        Option("--device", "of a model on `meta`: make the weights that are left there, initialized", {"default": "", "metavar": "DEVICE"}),
    ),
    view=f"{_HERE}.view:page",
    examine=f"{_HERE}.examine:examine",
    subjects="MODEL INPUT",
    takes_keywords=True,
    called="torchdebug_magics.probing.dry_runs.inputs:model_of",
)
