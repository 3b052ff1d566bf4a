"""What may be wrong with a training that stalls, as changes to be tried: the evidence of the first step -> changes, the likeliest first."""
