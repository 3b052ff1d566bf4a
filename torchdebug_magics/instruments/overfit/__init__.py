"""``%overfit``: a model on a few samples: subject -> training -> suspects, each a training with one change -> report."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]

_HERE = __name__

INSTRUMENT = Instrument(
    name="overfit",
    summary="trains on 8 samples, repeated: a correct training learns them; if not, names the one change with which it does",
    description="""Train on a few samples of one batch until the loss is close to its least value, or, if it stalls, find out why.

    %overfit model batch loss_function optimizer    the last two may be left out; a batch is a tuple, a dict or a tensor
    %overfit model batch                            a model that returns its loss, trained with Adam(lr=0.001)
    %overfit step                                   a function that makes one training step and returns the loss
    %overfit model loader loss_function optimizer --samples 100    whole epochs over 100 samples of each class alike
    %overfit trainer                                a Trainer of Lightning (`%overfit trainer model loader` before its fit) or transformers
    %%overfit                                       above a training loop: repeats the first batch that its DataLoader gives

A stalled training is repeated from the same start with exactly one thing changed, such as the learning rate, a frozen layer or the
reduction of the loss. The first change with which the samples are learned is the cause, and the fix is that change as code.

Every step sees the same samples and the same random numbers, so that dropout and augmentation stand still. Afterwards the model, the
optimizer, gradients, buffers, modes and random states are exactly as before.""",
    options=(
        Option(
            "--steps",
            "steps of each training, or epochs where the samples make several batches (200)",
            {"type": int, "default": 200, "metavar": "N"},
        ),
        Option("--samples", "samples that the batch is cut to (8)", {"type": int, "default": 8, "metavar": "N"}),
    ),
    probe=f"{_HERE}.probe:OverfitProbe",
    view=f"{_HERE}.view:page",
    live_view=f"{_HERE}.view:live",
    examine=f"{_HERE}.examine:examine",
    subjects="MODEL BATCH LOSS_FUNCTION OPTIMIZER",
    takes_names=True,
    takes_keywords=True,
    tells=True,
    runs_again=True,
)
