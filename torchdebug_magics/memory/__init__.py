"""What the memory magics share: who holds a storage, as a path from a named root; gauges of all memories; marks.

A path reads ``losses[0].grad_fn -> PowBackward0.saved_self``: roots -> walk over objects and containers -> found -> paths.
"""
