"""Every planted training fault; `test_the_corpus.py` has plain torch confirm what each of them expects.

A case is a function that builds the training with the fault or, where `right` is true, without; its decorator says what must be found.
"""

from tests.unit.instruments.overfit.trainings import (
    planted_data,
    planted_frozen,
    planted_graphs,
    planted_losses,
    planted_lost_inputs,
    planted_rates,
    planted_steps,
    planted_targets,
    planted_weights,
)

__all__ = ["CASES"]

CASES = (
    *planted_frozen.CASES,
    *planted_graphs.CASES,
    *planted_rates.CASES,
    *planted_steps.CASES,
    *planted_losses.CASES,
    *planted_targets.CASES,
    *planted_data.CASES,
    *planted_lost_inputs.CASES,
    *planted_weights.CASES,
)
