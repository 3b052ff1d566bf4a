"""One training on the same samples: steps that look alike -> what the first one did -> when it has learned; or with one change."""
