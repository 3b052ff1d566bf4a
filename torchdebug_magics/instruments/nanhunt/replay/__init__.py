"""A bad step, run again and written down: op_trace -> conclusion; `investigate` chooses the way.

`op_trace` has every op with its module and line, and where each tensor came from.
"""
