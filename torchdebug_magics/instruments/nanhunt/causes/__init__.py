"""Why the op made a NaN: evidence -> diagnose. The rules stand in the order of what they ask.

`op_table` asks the op, its operands and what made them, a row a cause; `diagnose` asks for constants in the code, and how large the numbers
are.
"""
