"""What this machine offers and what is used of it, found out without importing torch or initialising CUDA."""
