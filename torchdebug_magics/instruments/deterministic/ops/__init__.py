"""Every op of a run, as it is dispatched, and a few bytes for what it gave."""
