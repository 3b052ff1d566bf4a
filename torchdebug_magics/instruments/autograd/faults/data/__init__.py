"""What a training is given: its loaders, its samples, and what is counted over them."""
