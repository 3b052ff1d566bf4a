"""``%%deterministic``: the same numbers twice, or the op that differs, and why."""
