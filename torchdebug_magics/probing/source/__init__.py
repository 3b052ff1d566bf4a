"""Code as the interpreter runs it: whose a frame is, its local values, and the expression that it evaluates. Without torch."""
