"""Code that runs once more in one rank of a distributed job, alone: refuse (shards) -> call what is wrapped -> answer collectives."""
