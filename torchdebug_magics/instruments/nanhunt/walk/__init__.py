"""From a bad loss or gradient back to the op that made it: blamed_inputs -> birth_walk.

Which inputs are to blame is asked of the op itself, which runs again with stand-ins; infinities that somebody wrote
down, as those of a causal mask, are no birth.
"""
