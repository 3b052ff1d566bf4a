"""Code of the user's own that ends the fault, tried on the bad step: remedies -> source_edits -> verified_fix."""
