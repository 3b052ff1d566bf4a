"""What ranks need to compare their replicas of a model: only what is meant to be equal is noted, and no collective is issued."""
