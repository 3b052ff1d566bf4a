"""The user's source: whose code a frame runs and at which line, what a statement reads and writes, and how a fix edits it."""
