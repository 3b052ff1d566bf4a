"""Every planted training fault; `test_the_corpus.py` has plain torch confirm what each of them expects.

A case is a function that builds the training with the fault or, where `right` is true, without; its decorator says what must be found.
"""

from tests.unit.instruments.overfit import planted_data, planted_frozen, planted_losses, planted_steps, planted_weights

__all__ = ["CASES"]

CASES = planted_frozen.CASES + planted_steps.CASES + planted_losses.CASES + planted_data.CASES + planted_weights.CASES
