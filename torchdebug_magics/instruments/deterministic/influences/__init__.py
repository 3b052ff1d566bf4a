"""What a run is told from outside its code: `influence` has a line for each kind, `answers` gives it again or otherwise."""
