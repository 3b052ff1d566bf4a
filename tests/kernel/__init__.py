"""Real kernels."""
