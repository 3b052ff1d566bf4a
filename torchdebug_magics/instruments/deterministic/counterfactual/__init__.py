"""Why would another run give other numbers? Runs in which exactly one thing is otherwise, each compared with the first run."""
