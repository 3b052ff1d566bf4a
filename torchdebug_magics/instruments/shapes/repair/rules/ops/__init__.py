"""Rules for ops on tensors that the user's code calls: facts -> sentence and edits."""
