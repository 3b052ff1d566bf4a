"""Every healthy training: none of them may be given a cause. `passes` says whether 200 steps with noise held still get to the floor.

Where the floor of the loss is not zero, `floor` says what it is.
"""

from tests.unit.instruments.overfit.trainings import healthy_floors, healthy_losses, healthy_models, healthy_steps, healthy_transformers

__all__ = ["CASES"]

CASES = healthy_models.CASES + healthy_transformers.CASES + healthy_losses.CASES + healthy_floors.CASES + healthy_steps.CASES
