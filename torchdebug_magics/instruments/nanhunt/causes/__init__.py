"""Why the op made a NaN: evidence -> diagnose. The rules stand in the order of what they ask.

`operand_causes` ask the op and its operands, `domain_causes` the domain of the function, `neighbour_causes` what made its inputs,
`range_causes` how large the numbers are.
"""
