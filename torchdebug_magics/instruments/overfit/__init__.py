"""``%overfit``: a model on a few samples: subject -> training -> suspects, each a training with one change -> report."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="overfit",
    module=__name__,
    summary="trains on 8 samples repeatedly: a correct training learns them; otherwise names the one change that makes it learn",
    description="""Trains on a few samples of one batch until the loss is close to its minimum. If the loss stalls, finds out why.

    %overfit model batch loss_function optimizer    the last two may be left out; a batch is a tuple, a dict or a tensor
    %overfit model batch                            a model that returns its loss, trained with Adam(lr=0.001)
    %overfit step                                   a function that performs one training step and returns the loss
    %overfit model loader loss_function optimizer --samples 100    whole epochs over 100 samples, balanced by class
    %overfit trainer                                a Trainer of Lightning (`%overfit trainer model loader` before its fit) or transformers
    %%overfit                                       above a training loop: repeats the first batch of its DataLoader

A stalled training is repeated from the same start with exactly one change, such as another learning rate, an unfrozen layer or another
reduction of the loss. The first change that makes the model learn the samples is the cause, and the fix is that change as code.

Every step uses the same samples and the same random numbers, so dropout and augmentation do not vary. Afterwards the model, the
optimizer, gradients, buffers, modes and RNG states are exactly as before.""",
    options=(
        Option(
            "--steps",
            "steps of each training, or epochs where the samples make several batches (200)",
            {"type": int, "default": 200, "metavar": "N"},
        ),
        Option("--samples", "samples that the batch is cut to (8)", {"type": int, "default": 8, "metavar": "N"}),
        Option("--anyway", "train even if a step does what cannot be undone, such as a request", {"action": "store_true"}),
    ),
    subjects="MODEL BATCH LOSS_FUNCTION OPTIMIZER NAME=VALUE",
)
