"""What a forward does, while it runs: calls of modules by path, what made each tensor, and which op came through and was hardly meant."""
