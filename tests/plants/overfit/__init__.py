"""Trainings that stall, and healthy ones, for `%overfit`."""
