"""A model's forward, run without a trace: inputs (read from what the user wrote) -> stand-ins (fakes or copies) -> untouched -> arithmetic.

`inputs` reads the arguments, `faking` gives tensors that may be written, `untouched` puts the model and its surroundings back, `arithmetic`
sees every op and counts it by the formulas of `flops`.
"""
