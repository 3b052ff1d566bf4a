"""What a process of a distributed job knows alone: which rank it is, and what it can compute without the others."""
