"""Why a forward broke, in words, and the edits that were tried to repair it."""
