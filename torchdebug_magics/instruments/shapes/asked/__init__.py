"""What real ops refuse and fake ones let through: a suspicion -> the op itself, called on zeros -> the error that it raises."""
