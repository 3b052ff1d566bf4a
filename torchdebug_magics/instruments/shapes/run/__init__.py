"""One forward that leaves no trace: a dry run of `probing`, its calls followed -> what autograd saves."""
