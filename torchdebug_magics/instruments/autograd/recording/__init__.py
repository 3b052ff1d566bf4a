"""Ops of the first steps as plain data: listener -> tape -> answers (what made a tensor, what wrote it, what a graph node is)."""
