"""The table of a report: outline -> columns -> totals; beside it the largest parts, those never called, and what training takes."""
