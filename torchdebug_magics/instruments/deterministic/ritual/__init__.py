"""What is set so that torch gives the same numbers twice, put back afterwards, and told by ``%deterministic status``."""
