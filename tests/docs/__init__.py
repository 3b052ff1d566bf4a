"""The pages under docs/."""
