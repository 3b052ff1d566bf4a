"""Why a forward failed, in words, and the edits that were tried to repair it."""
