"""Why two runs from the same start differ: the op by itself, or the line of Python on the way to it."""
