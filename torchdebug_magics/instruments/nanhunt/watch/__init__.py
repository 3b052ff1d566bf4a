"""What is looked at while the cell runs, at next to no cost: sentinel -> checks.

`checks` decides what is looked at and when, and counts what was found, `sentinel` makes the one reduction, `update_checks` looks at
updates, takes them back, and knows the steps that a scaler skips.
"""
