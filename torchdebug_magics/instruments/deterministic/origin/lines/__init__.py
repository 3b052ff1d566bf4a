"""The lines of a run, one by one: `line_tracer` -> `look` at the names of a `line_statements` entry -> `digests` -> `line_steps`."""
