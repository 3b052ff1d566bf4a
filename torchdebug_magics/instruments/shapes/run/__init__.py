"""One forward that leaves no trace: inputs -> fakes or copies -> the ops, counted -> what autograd saves -> everything put back."""
