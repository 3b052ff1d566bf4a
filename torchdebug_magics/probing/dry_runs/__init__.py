"""A model's forward, run without a trace: inputs (read from what the user wrote) -> stand-ins (fakes or copies) -> untouched -> arithmetic.

`inputs` reads the arguments, `faking` and `copies` give tensors that may be written, `untouched` puts the model and its surroundings back,
`written_tensors` what no table of a module knows, `arithmetic` sees every op and counts it by the formulas of `flops`.
"""
