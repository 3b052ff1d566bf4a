"""The checks of the exercises in ``notebooks/exercises/``: one module an exercise, each with its `check`.

They are part of the package so that a notebook opened alone, as in Colab, finds its own. No answer stands in here in the clear: a fact is
kept as a hash, and code is judged by running it (`checking`).
"""
