"""From a bad loss or gradient back to the op that made it: bad_elements -> reached_elements -> blamed_inputs -> birth_walk.

Which inputs are to blame is asked of the op itself (`op_rerun`); infinities that somebody wrote down are no birth (`intentional_inf`).
"""
