"""A cell that failed: its error -> the call, or the lines that led to it -> once more without data; or a batch, a module, a checkpoint."""
