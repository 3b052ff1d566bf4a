"""What is looked at while the cell runs, at next to no cost: sentinel -> checks.

`checks` decides what is looked at and when, and counts what was found, `sentinel` makes the one reduction, `update_checks` looks at updates
and takes them back, `scaler_overflows` knows the steps that a scaler skips.
"""
