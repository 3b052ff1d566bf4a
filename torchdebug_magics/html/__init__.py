"""The only place that makes markup: an instrument's view makes a `Page` of blocks, `markup` and `plain` write it."""
