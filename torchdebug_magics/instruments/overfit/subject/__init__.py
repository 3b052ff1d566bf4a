"""What is trained, from what was named: a model, its batch and its loss; a function; a loader; a trainer."""
