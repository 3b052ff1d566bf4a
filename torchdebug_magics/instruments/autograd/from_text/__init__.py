"""Where nothing was recorded: the statements that led to a value, read from the source, and what in them cuts or carries a graph."""
