"""The kit that probes are made of; the only place where torch's hook APIs are called."""
