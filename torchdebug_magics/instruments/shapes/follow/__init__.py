"""What a forward does, while it runs: calls of modules by path, what made each tensor, and which op ran and is probably unintended."""
