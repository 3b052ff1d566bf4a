"""Edits beside the op that failed: of the steps before it, of tables and inputs that meet it, of the two ways that lead to it."""
