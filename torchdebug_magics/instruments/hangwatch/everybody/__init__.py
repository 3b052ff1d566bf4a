"""All who may wait or be waited for: one look -> links between processes -> the chain from the main thread to the root."""
