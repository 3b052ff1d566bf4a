"""The body run again from the same start, and what differed."""
