"""``%shrink``: two layers instead of forty-eight, in a live model: stacks -> settings -> edits -> dry forward -> report."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="shrink",
    module=__name__,
    summary="a live model with two layers instead of forty-eight, one of each kind; a forward proves that it runs, `--undo` restores it",
    description="""Removes layers from a live model, in place, so that a bug of the large model can be debugged in a small one.

    %shrink model                       keep two layers in each stack of layers
    %shrink model x --layers 4          keep four; the forward runs on this input, as in a call: x mask=mask, **batch, (1, 3, 224, 224)
    %shrink model --skip-attention      run attention in the last layer of each stack only
    %shrink model --undo                restore all layers, the same objects

Stacks of layers are found automatically (T5 and Whisper have two), and one layer of each kind stays: full and sliding attention, dense and
mixture of experts. Layer indices and the model's configuration are updated; the experts inside a layer stay. A forward before and after,
on tensors without data, proves that the model still runs; if it fails, the model is restored and the reason is shown. Without an input,
a small one is generated.

The removed layers stay in memory for `--undo`. A model on `meta` is shrunk before its weights exist: `--device cuda` then creates the
remaining weights and initializes them as the model does.""",
    options=(
        Option("--layers", "layers to keep in each stack (2), and at least one of each kind", {"type": int, "default": 2, "metavar": "N"}),
        Option(
            "--skip-attention",
            "run attention in the last layer of each stack only; the others return a tensor of its shape",
            {"action": "store_true"},
        ),
        Option("--undo", "restore all layers", {"action": "store_true"}),
        Option(
            "--device",
            "for a model on `meta`: create and initialize the remaining weights on this device",
            {"default": "", "metavar": "DEVICE"},
        ),
    ),
    subjects="MODEL INPUT NAME=VALUE",
)
