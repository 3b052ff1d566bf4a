"""Why the op made a NaN: evidence -> diagnose. The rules stand in the order of what they ask.

`operand_causes` ask the op, its operands and what made them; `diagnose` asks for the domain of the function, for constants in the code, and
how large the numbers are.
"""
