"""Loops that keep memory, and healthy ones that look so, for `%%memtrace`."""
