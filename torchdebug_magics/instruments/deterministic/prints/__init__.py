"""The fingerprint of a run, and its comparison with another."""
